"""Image folders: pixels, bad files by name, and that every way of fetching gives the same."""

import pathlib
import shutil
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import values
from PIL import Image

from tower_train import errors, host
from tower_train.data import image_files, images

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
    return values.fetched(examples, np.arange(examples.num_examples) if indices is None else indices)


@pytest.fixture(scope="module")
def plain(original, tmp_path_factory):
    """The original's examples without a cache, and all that they fetch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWER_TRAIN_DATA", str(tmp_path_factory.mktemp("plain")))
        examples = load(original)
    return examples, fetch(examples)


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


def test_the_cache_on_disk_is_used_and_follows_the_files(root, cache_dir, monkeypatch):
    before = fetch(load(root, cache="disk"))[0]
    [folder] = [path for path in cache_dir.iterdir() if path.is_dir()]
    stored = np.load(folder / "pixels.npy", mmap_mode="r+")
    stored[...] = 7
    stored.flush()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        assert (fetch(load(root, cache="disk"))[0] == 7).all(), "what is there needs no room"
    path = root / "train" / "cat" / "patient 0-0.png"
    Image.fromarray(np.full([20, 30, 3], 9, np.uint8)).save(path)
    after = fetch(load(root, cache="disk"))[0]
    assert (after[12] == 9).all()
    np.testing.assert_array_equal(np.delete(after, 12, axis=0), np.delete(before, 12, axis=0))


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(original, cache):
    listing = image_files.find(original, "train")
    with pytest.raises(errors.DataError, match=rf"^--cache={cache}: the decoded images take 5400.* GB, and .* free"):
        images.examples(listing, "mine", 10**6, 3, cache)


def written(values, mode=None, **options):
    return lambda path: Image.fromarray(values, mode).save(path, **options)


def flat(*shape, value):
    return np.full(shape, value, np.uint8)


def moving(path):
    """Two pictures, of which the first one counts."""
    Image.fromarray(flat(9, 6, 3, value=80)).save(
        path, save_all=True, append_images=[Image.fromarray(flat(9, 6, 3, value=200))]
    )


UNUSUAL = {  # {name: (how it is written, the grey that is read)}: the content counts, not the name
    "one pixel.png": (written(flat(1, 1, 3, value=77)), 77),
    "cmyk.jpg": (written(flat(9, 9, 4, value=100), "CMYK"), 94),  # (255 - 100)^2 / 255
    "16 bits.png": (written(np.full([9, 9], 40_000, np.uint16)), 40_000 // 257),
    "grey.png": (written(flat(9, 9, value=50)), 50),
    "alpha.png": (written(flat(9, 9, 4, value=60)), 60),
    "png.jpg": (written(flat(9, 6, 3, value=90), format="png"), 90),
    "palette.bmp": (lambda path: Image.fromarray(flat(9, 6, 3, value=51)).convert("P").save(path), 51),
    "moving.gif": (moving, 80),
    "moving.webp": (moving, 80),
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
        np.testing.assert_allclose(images[index].astype(int), value, atol=4 if "webp" in name else 2, err_msg=name)


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
    "bløt.jpg": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
    "self.jpg": (lambda path: path.symlink_to("self.jpg"), "cannot be read: Too many levels"),
}


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_bad_files_are_all_named_in_one_summary_and_left_out_where_that_is_asked_for(plain, root, cache, capfd):
    for name, (write, _) in BAD.items():
        write(root / "train" / "blåbær" / name)
    with pytest.raises(errors.DataError) as raised:
        load(root, cache=cache)
    text = str(raised.value)
    assert text.startswith(f"8 of 26 images in {root}/train cannot be used: ") and "\n" not in text
    assert "--skip_bad_images" in text
    for name, (_, why) in BAD.items():
        assert f"blåbær/{name} {why}" in text, text
    examples = load(root, cache=cache, skip_bad=True)  # from what that remembered
    order = [*range(17, -1, -1), 5]
    for found, expected in zip(fetch(examples, order), plain[1], strict=True):
        np.testing.assert_array_equal(found, expected[order])
    assert examples.notice.startswith("Left out: 8 of 26 images") and "blåbær/empty.png is empty" in examples.notice
    assert examples.fingerprint == plain[0].fingerprint
    assert capfd.readouterr() == ("", "")


def test_photographs_are_turned_as_the_camera_noted(root):
    path, exif = root / "test" / "cat" / "z.jpg", Image.Exif()
    exif[0x112] = 6  # a quarter to the right: CIPA DC-008 (Exif 2.3), section 4.6.4
    upright = smooth(np.random.default_rng(1))
    Image.fromarray(np.rot90(upright)).save(path, quality=100, subsampling=0, exif=exif)
    turned = fetch(load(root, "test"), [6])[0][0]
    expected = Image.fromarray(upright).resize((SIZE, SIZE), Image.BILINEAR)
    np.testing.assert_allclose(turned.astype(int), np.asarray(expected).astype(int), atol=4)


def test_a_cache_directory_that_cannot_be_written_matters_to_disk_only(original, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOWER_TRAIN_DATA", str(tmp_path / "file"))
    assert load(original).num_examples == 18
    with pytest.raises(errors.DataError, match="^--cache=disk: .*cannot be written"):
        load(original, cache="disk")


def test_long_summaries_count_what_they_do_not_name_and_no_class_is_left_out_whole(root):
    for i in range(25):
        (root / "test" / "cat" / f"{i:02}.jpg").write_text("")
    with pytest.raises(errors.DataError, match="^25 of 31 images.* cat/19.jpg is empty; and 5 more. Mend") as raised:
        load(root, "test")
    assert "20.jpg" not in str(raised.value)
    for path in (root / "test" / "cat").glob("patient*"):
        path.unlink()
    with pytest.raises(errors.DataError, match="No image of class cat is left"):
        load(root, "test", skip_bad=True)


def test_memory_is_taken_unasked_if_the_images_take_half_of_what_is_free(original, monkeypatch, cache_dir):
    asked = [("auto", 50), ("auto", 51), ("memory", 100), ("disk", 999), ("none", 1)]
    found = [images.place(cache, size, free_bytes=100) for cache, size in asked]
    assert found == ["memory", "none", "memory", "disk", "none"]
    monkeypatch.setattr(images.host, "free_memory", lambda: None)  # nobody knows
    assert load(original, cache="auto").num_examples == 18 and cache_dir.exists()


def test_free_memory_is_what_linux_says_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    assert host.free_memory() is None, "elsewhere"
    for text, expected in (("MemTotal: 9 kB\nMemAvailable:   3 kB\nBuffers: 5 kB\n", 3072), ("MemTotal: 9 kB\n", None)):
        host.MEMINFO.write_text(text)
        assert host.free_memory() == expected
