"""tower_train: graph-mode multi-GPU training on today's TensorFlow."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "tower_train" / "__init__.py").read_text())[1]

setup(
    name="tower_train",
    version=VERSION,
    description="Graph-mode multi-GPU training: one replica per device, gradients averaged on the CPU",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["tower_train", "tower_train.*", "cifar10", "cifar10.*"]),
    python_requires=">=3.10,<3.14",
    # The versions that were tested: tower_train/fronts/compat.py holds private names of both. On Python 3.10 Keras is
    # 3.12, its last version there. requests comes with TensorFlow and rich (the progress bar) with Keras anyway; read1
    # is from urllib3 2.2 on.
    install_requires=[
        "tensorflow>=2.21,<2.22",
        "keras>=3.12,<3.16",
        "numpy",
        "absl-py",
        "requests",
        "rich",
        "urllib3>=2.2",
    ],  # fmt: skip
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "tensorboard": ["tensorboard>=2.21"],
        "plots": ["matplotlib"],
        "test": [
            "hypothesis",
            "matplotlib",
            "pytest",
            "pytest-xdist",
            "pyyaml",
            "ruff>=0.17,<0.18",
            "tensorboard>=2.21",
        ],
    },
)
