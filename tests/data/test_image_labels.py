"""Images whose classes are in a table or in their names, laid out as Kaggle lays them out."""

import pytest

from tower_train import errors
from tower_train.data.image_files import find


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def classes(root, labels, split="train", **options):
    """Returns {file's name: class} of a split, and the notice."""
    listing = find(root, split, labels=labels, **options)
    pairs = zip(listing.names, listing.labels, strict=True)
    return {name: listing.class_names[label] for name, label in pairs}, listing.notice


def test_dogs_vs_cats_needs_one_option_which_the_message_names(tmp_path):
    """train/cat.0.jpg, and test1/1.jpg of unknown class."""
    make(tmp_path, "train/cat.0.jpg", "train/cat.1.jpg", "train/dog.0.jpg", "train/dog.10.jpg", "test1/1.jpg")
    with pytest.raises(errors.LayoutError, match=r"named by class \(cat, dog, ...\), give --labels=names. Expected:"):
        find(tmp_path, "train")
    found, notice = classes(tmp_path, "names")
    assert found == {"cat.0.jpg": "cat", "cat.1.jpg": "cat", "dog.0.jpg": "dog", "dog.10.jpg": "dog"}
    assert notice == f"--labels=names: 1 images without a class in {tmp_path} left out."
    assert find(tmp_path, "test", labels="names") is None
    assert len(classes(tmp_path, "names", "validation", validation_fraction=0.5)[0]) == 2


@pytest.mark.parametrize("test", ["test/f.jpg", "test/a.jpg"])
def test_dog_breed_needs_one_option_which_the_message_names(tmp_path, test):
    """labels.csv of id and breed beside train/ID.jpg; CIFAR-10's test images have the ids of those in train."""
    make(tmp_path, "train/a.jpg", "train/b.jpg", "train/c.jpg", test)
    (tmp_path / "labels.csv").write_text("id,breed\na,boxer\nb,pug\nc,boxer\nd,pug\n")
    with pytest.raises(
        errors.LayoutError, match=r"If labels.csv holds the classes, give --labels=labels.csv. Expected"
    ):
        find(tmp_path, "train")
    found, notice = classes(tmp_path, "labels.csv")
    assert found == {"a.jpg": "boxer", "b.jpg": "pug", "c.jpg": "boxer"}
    left_out = f"1 images without a class and 1 classes without their image in {tmp_path} left out."
    assert notice == f"--labels=labels.csv: {left_out}"
    assert find(tmp_path, "test", labels="labels.csv") is None


def test_ham10000_needs_the_column_which_the_message_names(tmp_path):
    """Two folders of images, and a table of which the second column names them. Unpacked twice, each counts once."""
    make(tmp_path, "HAM10000_images_part_1/I0.jpg", "HAM10000_images_part_2/I1.jpg", "ham10000_images_part_1/I0.jpg")
    (tmp_path / "HAM10000_metadata.csv").write_bytes(b"\xef\xbb\xbflesion_id,image_id,dx\r\nH0,I0,bkl\r\nH0,I1,nv\r\n")
    found = (
        "HAM10000_metadata.csv beside them is not read; if it holds the classes, give --labels=HAM10000_metadata.csv"
    )
    (tmp_path / "ham10000_images_part_1/I0.jpg").rename(tmp_path / "ham10000_images_part_1/I0 copy.jpg")
    assert found in find(tmp_path, "train").notice
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


def test_splits_with_classes_are_used(tmp_path):
    make(tmp_path, *(f"{split}/{name}_{i}.png" for split in ("train", "val", "test") for name in "ab" for i in (1, 2)))
    for split in ("train", "validation", "test"):
        assert classes(tmp_path, "names", split)[0] == {f"{name}_{i}.png": name for name in "ab" for i in (1, 2)}
    make(tmp_path, "test/new_1.png")
    with pytest.raises(errors.DataError, match="/test: no image in .*/train is of class new"):
        find(tmp_path, "train", labels="names")


@pytest.mark.parametrize(("labels", "text", "error"), [
    ("none.csv", "there is no such file in", errors.DataError),
    ("two.csv:kind", "1.jpg has two classes, a and b", errors.DataError),
    ("one.csv", "finds images of 1 classes", errors.DataError),
    ("others.csv", "no column of .* names images below", errors.DataError),
    ("two.csv:Kind", "there is no such column. Give one of: --labels=two.csv:kind", errors.ConfigError),
    ("empty.csv", "it is no CSV file with a header", errors.DataError),
    ("names", "finds images of 0 classes", errors.DataError),
    ("uneven.csv", "row 3 of .* has 3 cells, its header 2", errors.DataError),
])  # fmt: skip
def test_tables_that_give_no_classes_are_refused(tmp_path, labels, text, error):
    make(tmp_path, "1.jpg", "2.jpg", "empty.csv")
    (tmp_path / "two.csv").write_text("file,kind\n1.jpg,a\n1.jpg,b\n")
    (tmp_path / "one.csv").write_text("file,kind\n1.jpg,a\n2,a\n")
    (tmp_path / "uneven.csv").write_text("file,kind\n1.jpg,a\n2.jpg,b,c\n")
    (tmp_path / "others.csv").write_text("file,kind\nx,a\ny,b\n")
    with pytest.raises(error, match=text) as raised:
        find(tmp_path, "train", labels=labels)
    assert "\n" not in str(raised.value)


def test_cells_may_be_blank_and_labels_may_look_like_names(tmp_path):
    make(tmp_path, "train/1.png", "train/2.png", "train/3.png")
    (tmp_path / "labels.csv").write_text("label,file\n1,1.png\n2 , 2.png\n,3.png\n")
    assert classes(tmp_path, "labels.csv")[0] == {"1.png": "1", "2.png": "2"}
