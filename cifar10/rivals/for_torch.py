"""Writes the training images for PyTorch's processes: python -m cifar10.rivals.for_torch DATASET DATA_DIR FILE.npz"""

import sys

import numpy as np

from cifar10 import cifar10_94, records, source, whitening
from tower_train.workload import DataRequest


def main(dataset: str, data_dir: str, path: str) -> None:
    data = records.read_split(source.locate(DataRequest("train", dataset, data_dir or None))[0], "train")
    kernels = whitening.kernels(data.images[: cifar10_94.WHITENED_IMAGES])
    np.savez(path, images=data.images, labels=data.labels, whitening=kernels)


if __name__ == "__main__":
    main(*sys.argv[1:])
