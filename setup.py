"""tower_train: graph-mode multi-GPU training on today's TensorFlow."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "tower_train" / "__init__.py").read_text())[1]

ESTIMATOR = [
    "tensorflow-estimator==2.15.0",  # its last version; fronts/tf_estimator/library.py has what it misses today
    "tf_keras>=2.21,<2.22",  # Keras 2, of which the library's canned Estimators are made; it goes with tensorflow
]

COMMANDS = ["benchmark", "curves", "evaluate", "export", "find_rate", "new_workload", "predict", "report", "tf1"]


setup(
    name="tower_train",
    version=VERSION,
    description="Graph-mode multi-GPU training on TensorFlow: N towers train what one device trains",
    author="The tower_train maintainers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="tensorflow keras multi-gpu data-parallel distributed-training estimator multi_gpu_model horovod cifar10",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
    ],
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["tower_train", "tower_train.*", "cifar10", "cifar10.*"]),
    package_data={"tower_train": ["py.typed", "*.pyi"]},
    entry_points={
        "console_scripts": [
            f"{name.replace('_', '-')} = tower_train.console_scripts:run"
            for name in ("tower_train", *(f"tower_train_{command}" for command in COMMANDS))
        ]
    },
    python_requires=">=3.10,<3.14",
    # The versions that were tested: tower_train/fronts/compat.py holds private names of them. Keras comes with
    # TensorFlow; on Python 3.10 it is 3.12, its last version there.
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.12,<3.16", "numpy", "absl-py", "pillow>=10.1"],
    extras_require={
        "estimator": ESTIMATOR,
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "tensorboard": ["tensorboard>=2.21"],
        "tf1": [*ESTIMATOR, "tf-slim==1.1.0", "scipy"],  # tf.contrib's layers; what Keras rotates images by
        "plots": ["matplotlib"],
        "test": [
            *ESTIMATOR,
            "hypothesis",
            "matplotlib",
            "mypy>=2,<3",
            "pytest",
            "pytest-xdist",
            "pyyaml",
            "ruff>=0.17,<0.18",
            "tensorboard>=2.21",
        ],
    },
)
