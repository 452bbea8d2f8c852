"""Images in folders: splits, classes and groups; classes in a table or in names, as Kaggle lays them out; mistakes."""

import os

import keras
import numpy as np
import pytest

from tower_train import errors
from tower_train.data.image_files import find

CLASSES = ("a b", "blåbær", "cat")
# Three classes in train and in test, two images of each of three patients and of one patient.
BOTH = [
    f"{split}/{name}/patient {i // 2}-{i}{('.png', '.jpg', '.JPEG')[i % 3]}"
    for split, count in (("train", 6), ("test", 2))
    for name in CLASSES
    for i in range(count)
]
TRAIN = BOTH[:18]


def make(root, *names, **tables):
    """Makes empty files, and tables/NAME.csv, in a folder."""
    root.mkdir(exist_ok=True)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for name, text in tables.items():
        (root / f"{name}.csv").write_text(text)
    return root


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "data", *BOTH)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_there_are_three_splits(root, name):
    assert find(root, "validation") is None
    make(root / name, *(f"{each}/{i}.png" for each in CLASSES for i in (1, 2)), "cat/3.png")
    found = {split: find(root, split) for split in ("train", "validation", "test")}
    assert [len(listing.names) for listing in found.values()] == [18, 7, 6]
    assert [listing.split for listing in found.values()] == ["train", name, "test"]
    assert [found["validation"].paths()[i] for i in (0, -1)] == [
        f"{root}/{name}/{each}" for each in ("a b/1.png", "cat/3.png")
    ]
    np.testing.assert_array_equal(found["validation"].labels, [0, 0, 1, 1, 2, 2, 2])
    (root / "test").rename(root.parent / "elsewhere")
    assert find(root, "test") is None


def test_a_fraction_is_set_aside_by_groups(tmp_path):
    """A patient's images are in all three classes."""
    root = make(tmp_path / "data", *TRAIN)

    def aside(seed, pattern=r"patient \d+"):
        return find(root, "validation", 0.3, pattern, seed).names

    kept = find(root, "train", 0.3, r"patient \d+", seed=1).names
    assert sorted(kept + aside(1)) == sorted(find(root, "train").names)
    patients = [{os.path.basename(name).split("-")[0] for name in names} for names in (kept, aside(1))]
    assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 3
    assert len(aside(1)) == 6, "three patients of six images each: one holds 0.3 of all"
    assert len({aside(seed) for seed in range(20)}) == 3, "every patient's turn comes with some seed"
    assert aside(1, r"patient (\d)") in {aside(seed) for seed in range(20)}, "a bracket is the group"


def test_files_that_are_no_images_are_passed_over_and_counted_but_for_hidden_ones(root):
    make(root / "train/cat", ".DS_Store", ".hidden.jpg", "notes.txt", "more.txt", "README", "1.TIF", "deeper.jpg/x")
    make(root / "train/.ipynb_checkpoints", "x")
    listing = find(root, "train")
    assert (len(listing.names), listing.class_names) == (18, CLASSES)
    assert listing.notice == f"Passed over in {root}/train: 5 files that are no images, such as cat/1.TIF."


def test_images_in_folders_below_a_class_are_of_it_as_keras_has_them(root):
    make(root / "train/cat", "patient 7/1.jpg", "patient 7/left/2.jpg", ".thumbs/3.jpg", "patient 8/.4.jpg")
    listing = find(root, "train")
    assert {"cat/patient 7/1.jpg", "cat/patient 7/left/2.jpg"} < set(listing.names) and len(listing.names) == 20
    assert listing.notice == ""
    found = keras.utils.image_dataset_from_directory(root / "train", image_size=(1, 1)).file_paths
    assert {str(root / "train" / name) for name in listing.names} <= set(found)
    make(root, "other/OCT/train/cat/1.jpg", "other/__MACOSX/x")
    with pytest.raises(
        errors.DataError, match=f"holds no images, but OCT in it does. Give --data_dir={root}/other/OCT."
    ):
        find(root / "other", "train")


def test_an_empty_class_folder_is_called_that_and_no_class_that_others_lack(root):
    (root / "train/ant").mkdir()
    with pytest.raises(errors.DataError, match=f"^{root}/train: ant in it holds no .jpeg, .* file; remove it, or give"):
        find(root, "train")


def classes(root, labels, split="train", **options):
    """Returns {file's name: class} of a split, and the notice."""
    listing = find(root, split, labels=labels, **options)
    pairs = zip(listing.names, listing.labels, strict=True)
    return {name: listing.class_names[label] for name, label in pairs}, listing.notice


def test_dogs_vs_cats_needs_one_option_which_the_message_names(tmp_path):
    make(tmp_path, "train/cat.0.jpg", "train/cat.1.jpg", "train/dog.0.jpg", "train/dog.10.jpg", "test1/1.jpg")
    with pytest.raises(errors.DataError, match=r"named by class \(cat, dog, ...\), give --labels=names. Expected:"):
        find(tmp_path, "train")
    found, notice = classes(tmp_path, "names")
    assert found == {"cat.0.jpg": "cat", "cat.1.jpg": "cat", "dog.0.jpg": "dog", "dog.10.jpg": "dog"}
    assert notice == f"--labels=names: 1 images without a class in {tmp_path} left out."
    assert find(tmp_path, "test", labels="names") is None
    assert len(classes(tmp_path, "names", "validation", validation_fraction=0.5)[0]) == 2


@pytest.mark.parametrize("test", ["test/f.jpg", "test/a.jpg"])
def test_dog_breed_needs_one_option_which_the_message_names(tmp_path, test):
    """labels.csv of id and breed beside train/ID.jpg; CIFAR-10's test images have the ids of those in train."""
    make(
        tmp_path, "train/a.jpg", "train/b.jpg", "train/c.jpg", test, labels="id,breed\na,boxer\nb,pug\nc,boxer\nd,pug\n"
    )
    with pytest.raises(errors.DataError, match="If labels.csv holds the classes, give --labels=labels.csv. Expected"):
        find(tmp_path, "train")
    found, notice = classes(tmp_path, "labels.csv")
    assert found == {"a.jpg": "boxer", "b.jpg": "pug", "c.jpg": "boxer"}
    left_out = f"1 images without a class and 1 classes without their image in {tmp_path} left out."
    assert notice == f"--labels=labels.csv: {left_out}"
    assert find(tmp_path, "test", labels="labels.csv") is None


def test_a_cell_may_hold_commas_and_quotes_and_a_table_of_another_encoding_is_named(tmp_path):
    make(tmp_path, "train/a.jpg", "train/b.jpg")
    (tmp_path / "labels.csv").write_text('image,class\na,"small, brown"\nb,"dog ""Rex"""\n')
    assert classes(tmp_path, "labels.csv")[0] == {"a.jpg": "small, brown", "b.jpg": 'dog "Rex"'}
    (tmp_path / "labels.csv").write_bytes("image,class\na,Köln\nb,Bonn\n".encode("latin-1"))
    with pytest.raises(errors.DataError, match="byte 15 is not UTF-8; save it as UTF-8. Name a CSV file."):
        find(tmp_path, "train", labels="labels.csv")


def test_ham10000_needs_the_column_which_the_message_names(tmp_path):
    """Two folders of images, and a table of which the second column names them. Unpacked twice, each counts once."""
    make(tmp_path, "HAM10000_images_part_1/I0.jpg", "HAM10000_images_part_2/I1.jpg", "ham10000_images_part_1/I0.jpg")
    (tmp_path / "HAM10000_metadata.csv").write_bytes(b"\xef\xbb\xbflesion_id,image_id,dx\r\nH0,I0,bkl\r\nH0,I1,nv\r\n")
    (tmp_path / "ham10000_images_part_1/I0.jpg").rename(tmp_path / "ham10000_images_part_1/I0 copy.jpg")
    assert "if it holds them, give --labels=HAM10000_metadata.csv" in find(tmp_path, "train").notice
    with pytest.raises(errors.ConfigError, match="Give one of: --labels=HAM10000_metadata.csv:lesion_id, .*:dx.$"):
        find(tmp_path, "train", labels="HAM10000_metadata.csv")
    found, _ = classes(tmp_path, "HAM10000_metadata.csv:dx")
    assert found == {"HAM10000_images_part_1/I0.jpg": "bkl", "HAM10000_images_part_2/I1.jpg": "nv"}


def test_a_column_of_a_table_gives_groups_that_are_not_split(tmp_path):
    make(tmp_path, *(f"{kind}/{i}.jpg" for kind in "ab" for i in (kind + "0", kind + "1")))
    (tmp_path / "about.csv").write_text("patient,id\np0,a0\np1,a1\np0,b0\np1,b1\n")
    halves = [set(find(tmp_path, split, 0.5, "about.csv:patient").names) for split in ("train", "validation")]
    assert sorted(map(sorted, halves)) == [["a/a0.jpg", "b/b0.jpg"], ["a/a1.jpg", "b/b1.jpg"]]
    make(tmp_path, "a/a2.jpg")
    for column, text in (("patient", "a2.jpg: .* finds no group"), ("x", "x: there is no such column. .*: --group_p")):
        with pytest.raises(errors.UserError, match=text):
            find(tmp_path, "train", 0.5, f"about.csv:{column}")


def test_splits_with_classes_are_used(tmp_path, monkeypatch):
    """Sorted, whatever the order in which the disk has them."""
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: ((f, d, sorted(names, reverse=True)) for f, d, names in walk(root)))
    make(tmp_path, *(f"{split}/{name}_{i}.png" for split in ("train", "val", "test") for name in "ab" for i in (1, 2)))
    for split in ("train", "validation", "test"):
        expected = {f"{name}_{i}.png": name for name in "ab" for i in (1, 2)}
        assert [*classes(tmp_path, "names", split)[0].items()] == [*expected.items()]


def test_cells_may_be_blank_and_labels_may_look_like_names(tmp_path):
    make(tmp_path, "train/1.png", "train/2.png", "train/3.png", labels="label,file\n1,1.png\n2 , 2.png\n,3.png\n")
    assert classes(tmp_path, "labels.csv")[0] == {"1.png": "1", "2.png": "2"}


ASIDE, NAMES = dict(validation_fraction=0.5), dict(labels="names")
TWO = ["1.jpg", "2.jpg"]
MISTAKES = [  # files below the root, options, class of the error, words of its first line
    ([*TRAIN, *(f"val/{name}/1.jpg" for name in CLASSES)], ASIDE, errors.ConfigError, "{root}/val is there to val"),
    (TRAIN, ASIDE | dict(group_pattern="("), errors.ConfigError, "--group_pattern=(: no regular expression"),
    (TRAIN, ASIDE | dict(group_pattern="x"), errors.DataError, "patient 0-0.png: --group_pattern=x finds no group"),
    (TRAIN, ASIDE | dict(group_pattern="pat"), errors.DataError, "no images of class a b to train on, of 1 groups"),
    (TRAIN, dict(validation_fraction=0.01), errors.DataError, " to validate on, of 18 groups"),
    ([*BOTH, "train/dog/1.jpg"], {}, errors.DataError, "{root}/train/dog: there is no such class in {root}/test"),
    (None, {}, errors.DataError, "{root}: cannot be read: No such file"),
    ([], {}, errors.DataError, "{root}: holds 0 class folders, and 0 images outside of them"),
    (["train/1.jpg", "test/1.jpg"], {}, errors.DataError, "{root}/train: holds 0 class folders, and 1 images"),
    (["images/1.jpg", "images/2.jpg"], {}, errors.DataError, "{root}: holds 1 class folders, and 0 images"),
    (["a/1.jpg", "a/2.jpg", "b/deeper/1.txt"], {}, errors.DataError, "b in it holds no .jpeg, .jpg, .png, .gif, .bm"),
    ([f"below/{name}" for name in BOTH], {}, errors.DataError, "but below in it does. Give --data_dir={root}/below"),
    ([*(f"train/{n}_1.png" for n in "ab"), "test/o_1.png", "test/n_1.png"], NAMES, errors.DataError, "is of class n."),
    (TWO, dict(labels="none.csv"), errors.DataError, "there is no such file in {root}. Give folders, names (the cl"),
    (TWO, dict(labels="two.csv:kind"), errors.DataError, "1.jpg has a and b as kind"),
    (TWO, dict(labels="images.csv"), errors.DataError, "images.csv has no column beside that of the images"),
    (TWO, dict(labels="one.csv"), errors.DataError, "finds images of 1 classes"),
    (TWO, dict(labels="others.csv"), errors.DataError, "(file, kind) names images below"),
    (TWO, dict(labels="two.csv:Kind"), errors.ConfigError, "such column. Give one of: --labels=two.csv:kind"),
    (TWO, dict(labels="empty.csv"), errors.DataError, "it is no CSV file with a header"),
    (TWO, NAMES, errors.DataError, "finds images of 0 classes"),
    (TWO, dict(labels="uneven.csv"), errors.DataError, "row 3 of {root}/uneven.csv has 3 cells, its header 2"),
]
TABLES = dict(
    two="file,kind\n1.jpg,a\n1.jpg,b\n",
    one="file,kind\n1.jpg,a\n2,a\n",
    images="file\n1.jpg\n2\n",
    others="file,kind\nx,a\ny,b\n",
    empty="",
    uneven="file,kind\n1.jpg,a\n2.jpg,b,c\n",
)


@pytest.mark.parametrize(("names", "options", "error", "words"), MISTAKES)
def test_each_mistake_is_one_line_that_names_it(tmp_path, names, options, error, words):
    root = tmp_path / "data"
    if names is not None:
        make(root, *names, **(TABLES if names is TWO else {}))
    with pytest.raises(error) as raised:
        find(root, **({"split": "train"} | options))
    [line] = str(raised.value).splitlines()
    assert type(raised.value) is error and words.format(root=root) in line
