"""Where the files are that the rivals read by their own means."""

import pathlib

from cifar10 import download, generated, source
from tower_train import workload


def find(request: workload.DataRequest) -> pathlib.Path:
    """The folder with the .bin files of the data set that `cifar10.source.examples` gives for the same request.

    Args:
      request: its dataset is 'cifar10' or 'generated'; to ask for 'auto', ask `source.examples` first.
    """
    directory = pathlib.Path(request.data_dir).expanduser() if request.data_dir else source.default_directory()
    if request.dataset == "generated":
        return generated.generate(directory)
    return source.find_cifar10(directory) or download.download(directory)
