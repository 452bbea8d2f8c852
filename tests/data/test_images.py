"""Image folders: what is found, what is refused by name, and that every way of fetching gives the same pixels."""

import os
import pathlib
import shutil
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tower_train import errors
from tower_train.data import image_files, images
from tower_train.graph import step_failures

CLASSES = ("a b", "blåbær", "cat")
SIZE = 8


def smooth(rng, height=20, width=30):
    """uint8 [height, width, 3] of slowly changing colours, which JPEG keeps nearly as they are."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    corners = rng.uniform(0, 255, [4, 3])
    weights = np.stack([x * y, x * (1 - y), (1 - x) * y, (1 - x) * (1 - y)], axis=-1)
    return np.round(weights @ corners).astype(np.uint8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """train and test with three classes, 6 and 2 images each, in three formats. Copy it to change it."""
    root, rng = tmp_path_factory.mktemp("folders") / "data", np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for class_name in CLASSES:
            folder = root / split / class_name
            folder.mkdir(parents=True)
            for i in range(count):
                name = f"patient {i // 2}-{i}{('.png', '.jpg', '.JPEG')[i % 3]}"
                Image.fromarray(smooth(rng)).save(folder / name, quality=100, subsampling=0)
    return root


@pytest.fixture
def root(original, tmp_path):
    return pathlib.Path(shutil.copytree(original, tmp_path / "data"))


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWER_TRAIN_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "image_folder"


def load(root, split="train", channels=3, cache="none", skip_bad=False, **find):
    return images.examples(image_files.find(root, split, **find), "mine", SIZE, channels, cache, skip_bad)


def fetch(examples, indices=None):
    """(images, labels) as the stream fetches them."""
    indices = np.arange(examples.num_examples) if indices is None else indices
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = tf.data.Dataset.from_tensors(np.asarray(indices, np.int64)).map(examples.open())
        batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        assert batch[0].shape[1:3] == (SIZE, SIZE)
        return session.run(batch)


@pytest.fixture(scope="module")
def plain(original, tmp_path_factory):
    """The original's examples without a cache, and all that they fetch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWER_TRAIN_DATA", str(tmp_path_factory.mktemp("plain")))
        examples = load(original)
    return examples, fetch(examples)


def test_labels_are_the_places_of_the_folder_names_in_sorted_order(original, plain):
    of_test = load(original, "test")
    for examples, (_, labels), count in ((*plain, 6), (of_test, fetch(of_test), 2)):
        assert examples.class_names == CLASSES and examples.num_examples == 3 * count
        assert labels.tolist() == np.repeat([0, 1, 2], count).tolist()


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_decoded_and_resized(original, channels):
    """The oracle is TensorFlow, whose antialiased bilinear filter is the same, but not rounded between its passes."""
    images, _ = fetch(load(original, channels=channels))
    assert images.dtype == np.uint8 and images.shape == (18, SIZE, SIZE, channels)
    for image, path in zip(images, image_files.find(original, "train").paths(), strict=True):
        contents = pathlib.Path(path).read_bytes()
        if path.endswith(".png"):
            whole = tf.io.decode_png(contents, channels=channels)
        else:
            whole = tf.io.decode_jpeg(contents, channels=channels, dct_method="INTEGER_ACCURATE")
        expected = tf.round(tf.image.resize(whole, [SIZE, SIZE], antialias=True)).numpy()
        np.testing.assert_allclose(image.astype(int), expected, atol=1 if channels == 3 else 2)


@pytest.mark.parametrize("cache", ["memory", "disk", "auto"])
def test_every_cache_gives_the_pixels_that_none_gives(original, plain, cache):
    indices = [17, 0, 5, 5]
    expected = [array[indices] for array in plain[1]]
    for _ in range(2):  # the second finds what the first left
        found = fetch(load(original, cache=cache), indices)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_the_cache_on_disk_is_used_and_follows_the_files(root, cache_dir):
    before = fetch(load(root, cache="disk"))[0]
    [folder] = [path for path in cache_dir.iterdir() if path.is_dir()]
    stored = np.load(folder / "pixels.npy", mmap_mode="r+")
    stored[...] = 7
    stored.flush()
    assert (fetch(load(root, cache="disk"))[0] == 7).all()
    path = root / "train" / "cat" / "patient 0-0.png"
    Image.fromarray(np.full([20, 30, 3], 9, np.uint8)).save(path)
    after = fetch(load(root, cache="disk"))[0]
    assert (after[12] == 9).all()
    np.testing.assert_array_equal(np.delete(after, 12, axis=0), np.delete(before, 12, axis=0))


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(original, cache):
    listing = image_files.find(original, "train")
    with pytest.raises(errors.DataError, match=rf"^--cache={cache}: the decoded images take 5400.* GB, and .* free"):
        images.examples(listing, "mine", 10**7 // 10, 3, cache)


@pytest.mark.parametrize(
    ("cache", "num_bytes", "expected"),
    [
        ("auto", 50, "memory"),
        ("auto", 51, "none"),
        ("memory", 100, "memory"),
        ("disk", 999, "disk"),
        ("none", 1, "none"),
    ],
)
def test_memory_is_taken_unasked_if_the_images_take_half_of_what_is_free(cache, num_bytes, expected):
    assert images.place(cache, num_bytes, free_bytes=100) == expected


def test_a_cache_that_is_there_is_used_on_a_full_disk(original, monkeypatch):
    before = fetch(load(original, cache="disk"))[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    np.testing.assert_array_equal(fetch(load(original, cache="disk"))[0], before)
    with pytest.raises(errors.DataError, match="^--cache=disk: the decoded images take"):
        load(original, "test", cache="disk")


def cmyk(path):
    Image.fromarray(np.full([9, 9, 4], 100, np.uint8), "CMYK").save(path)


def deep(path):
    Image.fromarray(np.full([9, 9], 40_000, np.uint16)).save(path)


def flat(*shape, value):
    return lambda path: Image.fromarray(np.full(shape, value, np.uint8)).save(path)


UNUSUAL = {
    "one pixel.png": (flat(1, 1, 3, value=77), 77),
    "cmyk.jpg": (cmyk, 94),  # (255 - 100)^2 / 255
    "16 bits.png": (deep, 40_000 // 257),
    "grey.png": (flat(9, 9, value=50), 50),
    "alpha.png": (flat(9, 9, 4, value=60), 60),
}


@pytest.mark.parametrize("channels", [1, 3])
def test_unusual_images_are_handled(root, channels):
    for name, (write, _) in UNUSUAL.items():
        write(root / "test" / "cat" / name)
    images, labels = fetch(load(root, "test", channels))
    names = image_files.find(root, "test").names
    for name, (_, value) in UNUSUAL.items():
        index = names.index(f"cat/{name}")
        assert labels[index] == 2
        np.testing.assert_allclose(images[index].astype(int), value, atol=2, err_msg=name)


def truncate(path):
    Image.fromarray(smooth(np.random.default_rng(1), 90, 90)).save(path)
    path.write_bytes(path.read_bytes()[:-400])


def declare(path):
    """A small image that says it is of 60,000 x 50,000 pixels, which would take 36 GB."""
    Image.fromarray(np.zeros([9, 9, 3], np.uint8)).save(path)
    contents = path.read_bytes()
    if path.suffix == ".png":
        header = contents[12:16] + struct.pack(">II", 60_000, 50_000) + contents[24:29]
        contents = contents[:12] + header + struct.pack(">I", zlib.crc32(header)) + contents[33:]
    else:
        frame = contents.index(b"\xff\xc0") + 5
        contents = contents[:frame] + struct.pack(">HH", 50_000, 60_000) + contents[frame + 4 :]
    path.write_bytes(contents)


BAD = {
    "bomb.png": (declare, "cannot be decoded: Image size (3000000000 pixels) exceeds limit"),
    "bomb.jpg": (declare, "cannot be decoded: Image size (3000000000 pixels) exceeds limit"),
    "cut.jpg": (truncate, "cannot be decoded: image file is truncated"),
    "cut.png": (truncate, "cannot be decoded: image file is truncated"),
    "text.jpg": (lambda path: path.write_text("hello"), "is no JPEG, PNG, GIF, BMP or WebP image"),
    "empty.png": (lambda path: path.write_bytes(b""), "is empty"),
    "tiff.png": (lambda path: Image.new("L", (9, 9)).save(path, "tiff"), "is no JPEG, PNG, GIF, BMP or WebP image"),
    "bløt.jpg": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
    "self.jpg": (lambda path: path.symlink_to("self.jpg"), "cannot be read: Too many levels"),
    "pipe.jpg": (os.mkfifo, "is empty"),
}


@pytest.fixture
def with_bad(root):
    for name, (write, _) in BAD.items():
        write(root / "train" / "blåbær" / name)
    return root


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_bad_files_are_all_named_in_one_summary(with_bad, cache, capfd):
    with pytest.raises(errors.DataError) as raised:
        load(with_bad, cache=cache)
    text = str(raised.value)
    assert text.startswith(f"10 of 28 images in {with_bad}/train cannot be used: ") and "\n" not in text
    assert "--skip_bad_images" in text
    for name, (_, why) in BAD.items():
        assert f"blåbær/{name} {why}" in text, text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_bad_files_are_left_out_where_that_is_asked_for(plain, with_bad, cache, capfd):
    if cache == "disk":
        load(with_bad, cache=cache, skip_bad=True)
    examples = load(with_bad, cache=cache, skip_bad=True)  # from what that remembered
    for found, expected in zip(fetch(examples), plain[1], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert examples.notice.startswith("Left out: 10 of 28 images") and "blåbær/empty.png is empty" in examples.notice
    assert examples.fingerprint == plain[0].fingerprint
    assert capfd.readouterr() == ("", "")


def test_a_class_of_bad_files_only_is_refused(root):
    for path in (root / "train" / "cat").iterdir():
        path.write_text("")
    with pytest.raises(errors.DataError, match="No image of class cat is left"):
        load(root, skip_bad=True)


def test_long_summaries_count_what_they_do_not_name(root):
    for i in range(25):
        (root / "test" / "cat" / f"{i:02}.jpg").write_text("")
    with pytest.raises(errors.DataError, match="^25 of 31 images.* cat/19.jpg is empty; and 5 more. Mend") as raised:
        load(root, "test")
    assert "20.jpg" not in str(raised.value)


def test_hidden_files_and_other_types_are_passed_over_and_counted(root):
    folder = root / "train" / "cat"
    for name in (".DS_Store", ".hidden.jpg", "notes.txt", "more.txt", "README", "1.TIF"):
        (folder / name).write_text("x")
    (folder / "deeper.jpg").mkdir()
    (root / "train" / ".ipynb_checkpoints").mkdir()
    examples = load(root)
    assert examples.num_examples == 18 and examples.class_names == CLASSES
    assert examples.notice == (
        f"Passed over in {root}/train: 1 .tif, 2 .txt, 1 folders, 2 hidden, 1 without extension."
    )


@pytest.mark.parametrize(("there", "missing"), [("train", "test"), ("test", "train")])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_in_one_split_only_is_an_error(root, there, missing, split):
    shutil.copytree(root / there / "cat", root / there / "dog")
    with pytest.raises(errors.DataError, match=f"^{root}/{there}/dog: there is no such class in {root}/{missing}"):
        load(root, split)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(errors.DataError, match=f"^{tmp_path}/none: cannot be read: No such file"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ": holds 0 class folders, and 0 images outside of them; at least two classes are needed."),
        (["1.jpg", "2.png", "list.csv"], ": holds 0 class folders, and 2 images outside of them"),
        (["train/1.jpg", "test/1.jpg"], "/train: holds 0 class folders, and 1 images outside of them"),
        (["images/1.jpg", "images/2.jpg"], ": holds 1 class folders, and 0 images"),
        (["a/1.jpg", "a/2.jpg", "b/deeper/1.jpg"], ": b in it holds no .jpeg, .jpg, .png, .gif, .bmp, .webp file."),
    ],
)
def test_what_is_wrong_with_a_layout_is_said_with_the_right_one(tmp_path, names, text):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    (tmp_path / "data").mkdir(exist_ok=True)
    with pytest.raises(errors.DataError) as raised:
        load(tmp_path / "data")
    first, *tree = str(raised.value).splitlines()
    assert first.startswith(f"{tmp_path}/data{text}") and first.endswith("Expected:")
    assert tree[:3] == [f"  {tmp_path}/data", "  ├── train", tree[2]] and tree[2].startswith("  │   ├── cats ")


def test_the_folder_above_the_right_one_is_told_from_it(root):
    with pytest.raises(
        errors.DataError, match=f"^{root.parent}: holds no images, but data in it does. Give --data_dir={root}"
    ):
        load(root.parent)


def test_so_is_one_with_other_folders_beside_it(tmp_path):
    for name in ("a/list.csv", "pictures/train/cat/1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    with pytest.raises(errors.DataError, match=f"but pictures in it does. Give --data_dir={tmp_path}/pictures"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bmp", "P"), ("gif", "RGB"), ("webp", "RGB"), ("jpg", "png")],
)
def test_other_formats_are_read(root, name, mode):
    """The content counts, not the name. Of moving images the first one."""
    colours = [(255, 0, 0), (0, 0, 255)]
    frames = [Image.new("RGB", (9, 6), colour) for colour in colours]
    options = dict(save_all=True, append_images=frames[1:]) if name in ("gif", "webp") else {}
    image, kind = (frames[0], "png") if mode == "png" else (frames[0].convert(mode), name)
    image.save(root / "test" / "cat" / f"z.{name}", kind, **options)
    images, labels = fetch(load(root, "test"))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 2]
    expected = np.asarray(image.convert("RGB"))[0, 0]
    np.testing.assert_allclose(images[6].astype(int), np.broadcast_to(expected, [SIZE, SIZE, 3]), atol=4)


@pytest.mark.parametrize("cache", ["none", "disk"])
def test_photographs_are_turned_as_the_camera_noted(root, cache):
    path, exif = root / "test" / "cat" / "z.jpg", Image.Exif()
    exif[0x112] = 6  # a quarter to the right: CIPA DC-008 (Exif 2.3), section 4.6.4
    upright = smooth(np.random.default_rng(1))
    Image.fromarray(np.rot90(upright)).save(path, quality=100, subsampling=0, exif=exif)
    turned = fetch(load(root, "test", cache=cache), [6])[0][0]
    expected = Image.fromarray(upright).resize((SIZE, SIZE), Image.BILINEAR)
    np.testing.assert_allclose(turned.astype(int), np.asarray(expected).astype(int), atol=4)


def test_a_run_on_tensorflows_pixels_is_another_run(root):
    """The fingerprint says which decoder made the pixels, so that a run before it is refused in words."""
    assert load(root).fingerprint == f"{image_files.find(root, 'train').fingerprint()} decoded by Pillow"


def test_a_file_that_changes_during_a_run_is_named(root):
    """Read anew each epoch, it would be trained on as another image, or libjpeg would remark on it."""
    examples = load(root)
    path = root / "train" / "cat" / "patient 0-0.png"
    contents = path.read_bytes()
    path.write_bytes(contents[:100] + bytes([contents[100] ^ 255]) + contents[101:])
    with pytest.raises(errors.DataError) as raised, step_failures.named("mine", "workload"):
        fetch(examples)
    assert str(raised.value) == f"mine: the input failed: {path} is not what it was when the run began."


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_there_are_three_splits(root, name):
    """Folders for validation are not tested on, and what is not there is None."""
    assert image_files.find(root, "validation") is None
    shutil.copytree(root / "test", root / name)
    (root / name / "cat" / "more.png").write_bytes((root / "test" / "cat" / "patient 0-0.png").read_bytes())
    sizes = {split: len(image_files.find(root, split).names) for split in ("train", "validation", "test")}
    assert sizes == {"train": 18, "validation": 7, "test": 6}
    assert image_files.find(root, "validation").split == name
    shutil.rmtree(root / "test")
    assert image_files.find(root, "test") is None


def test_a_fraction_is_set_aside_by_groups(root):
    """Two of the nine groups' images straddle classes: a patient is in all three."""
    shutil.rmtree(root / "test")
    train, test = (image_files.find(root, split, 0.3, r"patient \d+", seed=1) for split in ("train", "validation"))
    assert sorted(train.names + test.names) == sorted(image_files.find(root, "train").names)
    patients = [{os.path.basename(name).split("-")[0] for name in listing.names} for listing in (train, test)]
    assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 3
    assert len(test.names) == 6, "three patients of six images each: one holds 0.3 of all"
    chosen = {image_files.find(root, "validation", 0.3, r"patient \d+", seed).names for seed in range(20)}
    assert len(chosen) == 3, "every patient's turn comes with some seed"
    assert image_files.find(root, "validation", 0.3, r"patient \d+", seed=1).names == test.names
    assert set(image_files.find(root, "validation", 0.3, r"patient (\d)", seed=1).names) in [set(c) for c in chosen]


def test_class_folders_may_lie_in_the_directory_itself(root):
    names = image_files.find(root / "train", "train").names
    assert names == image_files.find(root, "train").names
    train, test = (image_files.find(root / "train", split, 0.4, seed=3).names for split in ("train", "validation"))
    assert sorted(train + test) == sorted(names) and len(test) == 8


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (False, dict(validation_fraction=0.5), "--validation_fraction=0.5: .*/val is there to validate on"),
        (True, dict(validation_fraction=0.5, group_pattern="("), r"--group_pattern=\(: no regular expression"),
        (True, dict(validation_fraction=0.5, group_pattern="x"), "patient 0-0.png: --group_pattern=x finds no group"),
        (True, dict(validation_fraction=0.5, group_pattern="pat"), "leaves no images of class a b to train on, of 1"),
        (True, dict(validation_fraction=0.01), "leaves no images of class .* to validate on, of 18 groups"),
    ],
)
def test_splits_that_cannot_be_made_are_refused(root, change, options, text):
    if change:
        shutil.rmtree(root / "test")
    else:
        (root / "test").rename(root / "val")
    with pytest.raises(errors.UserError, match=text):
        image_files.find(root, **({"split": "train"} | options))


def test_the_fingerprint_follows_names_and_sizes(root):
    first = load(root).fingerprint
    os.utime(root / "train" / "cat" / "patient 0-0.png", (0, 0))
    assert load(root).fingerprint == first
    (root / "train" / "cat" / "patient 0-0.png").rename(root / "train" / "cat" / "patient 9-0.png")
    assert load(root).fingerprint != first


def test_a_cache_directory_that_cannot_be_written_matters_to_disk_only(original, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOWER_TRAIN_DATA", str(tmp_path / "file"))
    assert load(original).num_examples == 18
    with pytest.raises(errors.DataError, match="^--cache=disk: .*cannot be written"):
        load(original, cache="disk")
