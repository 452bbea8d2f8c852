"""Folders of images: the splits, the classes and the groups that are found, and one line for each mistake."""

import os
import pathlib

import pytest

from tower_train import errors
from tower_train.data.image_files import find

CLASSES = ("a b", "blåbær", "cat")


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.fixture
def root(tmp_path):
    """train and test with three classes, two images each of three and of one patients."""
    names = [f"{split}/{name}/patient {i // 2}-{i}{('.png', '.jpg', '.JPEG')[i % 3]}"
             for split, count in (("train", 6), ("test", 2)) for name in CLASSES for i in range(count)]  # fmt: skip
    return make(tmp_path / "data", *names)


def without_test(root):
    (root / "test").rename(root.parent / "elsewhere")


def with_a_class(split):
    return lambda root: make(root / split / "dog", "1.jpg")


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_there_are_three_splits(root, name):
    """Folders for validation are not tested on, and what is not there is None."""
    assert find(root, "validation") is None
    make(root / name, *(f"{each}/{i}.png" for each in CLASSES for i in (1, 2)), "cat/3.png")
    assert {split: len(find(root, split).names) for split in ("train", "validation", "test")} == {
        "train": 18, "validation": 7, "test": 6,
    }  # fmt: skip
    assert find(root, "validation").split == name
    without_test(root)
    assert find(root, "test") is None


def test_a_fraction_is_set_aside_by_groups(root):
    """A patient's images are in all three classes."""
    without_test(root)
    train, aside = (find(root, split, 0.3, r"patient \d+", seed=1) for split in ("train", "validation"))
    assert sorted(train.names + aside.names) == sorted(find(root, "train").names)
    patients = [{os.path.basename(name).split("-")[0] for name in listing.names} for listing in (train, aside)]
    assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 3
    assert len(aside.names) == 6, "three patients of six images each: one holds 0.3 of all"
    chosen = {find(root, "validation", 0.3, r"patient \d+", seed).names for seed in range(20)}
    assert len(chosen) == 3, "every patient's turn comes with some seed"
    assert find(root, "validation", 0.3, r"patient \d+", seed=1).names == aside.names
    assert set(find(root, "validation", 0.3, r"patient (\d)", seed=1).names) in [set(names) for names in chosen]


def test_class_folders_may_lie_in_the_directory_itself(root):
    names, notice = find(root / "train", "train").names, find(root / "train", "train").notice
    assert names == find(root, "train").names
    assert notice == f"{root}/train is one of the splits in {root}. To use them all give --data_dir={root}."
    without_test(root)
    assert find(root / "train", "train").notice == ""
    train, aside = (find(root / "train", split, 0.4, seed=3).names for split in ("train", "validation"))
    assert sorted(train + aside) == sorted(names) and len(aside) == 8


def test_hidden_files_and_other_types_are_passed_over_and_counted(root):
    make(root / "train/cat", ".DS_Store", ".hidden.jpg", "notes.txt", "more.txt", "README", "1.TIF", "deeper.jpg/x")
    make(root / "train/.ipynb_checkpoints", "x")
    listing = find(root, "train")
    assert (len(listing.names), listing.class_names) == (18, CLASSES)
    counts = "1 .tif, 2 .txt, 1 folders, 2 hidden, 1 without extension"
    assert listing.notice == f"Passed over in {root}/train: {counts}."


def test_the_fingerprint_follows_names_and_sizes(root):
    first, path = find(root, "train").fingerprint(), root / "train" / "cat" / "patient 0-0.png"
    os.utime(path, (0, 0))
    assert find(root, "train").fingerprint() == first
    path.write_text("x")
    assert len({first, second := find(root, "train").fingerprint()}) == 2
    path.rename(path.with_name("patient 9-0.png"))
    assert find(root, "train").fingerprint() not in (first, second)


ASIDE = dict(validation_fraction=0.5)


@pytest.mark.parametrize(("change", "options", "text"), [
    (lambda root: (root / "test").rename(root / "val"), ASIDE, "--validation_fraction=0.5: {root}/val is there to val"),
    (without_test, ASIDE | dict(group_pattern="("), "--group_pattern=(: no regular expression"),
    (without_test, ASIDE | dict(group_pattern="x"), "patient 0-0.png: --group_pattern=x finds no group"),
    (without_test, ASIDE | dict(group_pattern="pat"), "leaves no images of class a b to train on, of 1"),
    (without_test, dict(validation_fraction=0.01), " to validate on, of 18 groups"),
    (with_a_class("train"), {}, "{root}/train/dog: there is no such class in {root}/test"),
    (with_a_class("test"), {}, "{root}/test/dog: there is no such class in {root}/train"),
    (with_a_class("test"), dict(split="test"), "{root}/test/dog: there is no such class in {root}/train"),
    (lambda root: root.rename(root.parent / "none"), {}, "{root}: cannot be read: No such file"),
])  # fmt: skip
def test_splits_that_cannot_be_made_are_refused(root, change, options, text):
    change(root)
    with pytest.raises(errors.UserError) as raised:
        find(root, **({"split": "train"} | options))
    assert text.format(root=root) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("names", "text"), [
    ([], ": holds 0 class folders, and 0 images outside of them; at least two classes are needed."),
    (["1.jpg", "2.png", "list.csv"], ": holds 0 class folders, and 2 images outside of them"),
    (["train/1.jpg", "test/1.jpg"], "/train: holds 0 class folders, and 1 images outside of them"),
    (["images/1.jpg", "images/2.jpg"], ": holds 1 class folders, and 0 images"),
    (["a/1.jpg", "a/2.jpg", "b/deeper/1.jpg"], ": b in it holds no .jpeg, .jpg, .png, .gif, .bmp, .webp file."),
])  # fmt: skip
def test_what_is_wrong_with_a_layout_is_said_with_the_right_one(tmp_path, names, text):
    (tmp_path / "data").mkdir()
    with pytest.raises(errors.LayoutError) as raised:
        find(make(tmp_path / "data", *names), "train")
    first, *tree = str(raised.value).splitlines()
    assert first.startswith(f"{tmp_path}/data{text}") and first.endswith("Expected:")
    assert tree[:2] == [f"  {tmp_path}/data", "  ├── train"] and tree[2].startswith("  │   ├── cats ")


@pytest.mark.parametrize("beside", [[], ["a/list.csv"]])
def test_the_folder_above_the_right_one_is_told_from_it(root, beside):
    above = make(pathlib.Path(root.parent), *beside)
    with pytest.raises(
        errors.DataError, match=f"^{above}: holds no images, but data in it does. Give --data_dir={root}"
    ):
        find(above, "train")
