"""The reference workload: the CIFAR-10 network of TensorFlow's tutorial, on CIFAR-10 or on drawn images."""

from cifar10 import convnet, distort, source
from tower_train.workload import Workload

WORKLOAD = Workload(
    name="cifar10",
    examples=source.examples,
    inference=convnet.inference,
    distort=distort.distort,
    prepare=distort.prepare,
    datasets=source.DATASETS,
)
