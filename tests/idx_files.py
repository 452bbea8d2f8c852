"""Fashion-MNIST's four files, gzipped, with a few images of noise."""

import gzip
import struct

import numpy as np


def idx(array, code=8):
    """An idx file's bytes; code: of the type of its values, 8 for bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(folder, num_train=48, num_test=12):
    rng = np.random.default_rng(0)
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        images, labels = rng.integers(0, 256, [count, 28, 28], np.uint8), (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
