"""Where the files are that the rivals read by their own means."""

import pathlib

from cifar10 import download, generated, source
from tower_train import workload
from tower_train.data import directories


def find(request: workload.DataRequest) -> pathlib.Path:
    """The folder with the .bin files of the data set that `cifar10.source.examples` gives for the same request.

    Args:
      request: its dataset is 'cifar10' or 'generated'; to ask for 'auto', ask `source.examples` first.
    """
    directory = directories.chosen(request.data_dir)
    if request.dataset == "generated":
        return generated.generate(directory)
    return source.find_cifar10(directory) or download.download(directory)
