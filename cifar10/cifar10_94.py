"""The recipes that take CIFAR-10 to 94 % with 0.2 PFLOP, to 95 % with 1.0 and to 96 % with 3.6.

The network comes from Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498 (sections named
below are that paper's), with SiLU after the normalisations. Muon trains it, and filters keep a fixed norm, as in
airbench94_muon (https://github.com/KellerJordan/cifar10-airbench). The numbers are from "script", cifar10_speedrun.py
of https://github.com/hiverge/cifar10-speedrun, the record of September 2025. Unlike the script, this recipe rescales
filters after every step (so decay would not affect them), begins on smaller images, starts leaving out easy images
later, and evaluates further views only of images in doubt.

For 95 % the blocks are wider. For 96 %, as in legacy/airbench96.py of the same repository, each block has a third
convolution and a residual connection around its last two, and training images are shifted further and have a square
cut out.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from cifar10 import whitening
from cifar10.convolution import convolution, is_by_spectra, max_pool
from tower_train import initializers, layers
from tower_train.workload import Examples

v1 = tf.compat.v1

NUM_CLASSES = 10
WHITENED_IMAGES = 5000  # section 3.2: the first training images, whose patches the fixed first layer whitens
FULL_SIZE = {0: 32}  # {epochs seen: pixels each way}
LEAST_SIZE = 9  # of images: whitening and three poolings leave one pixel
WHITENING_BIAS_EPOCHS = 0.2  # script: seven steps, at a rate that falls to 0; here half that rate
LOGIT_SCALE = 1 / 9  # airbench94_muon; the script divides by the number of features
MOVING_MOMENTUM = 0.5566  # of batch normalisation's moving statistics: script

IN = 0.851  # scaled_swish(IN * x) is GELU times 1.702, which the next normalisation removes
IN_SILU = 1 / 2  # scaled_swish(x / 2) is SiLU

# Momentum moves all variables except filters. The script's rates are for the sum of a batch's losses; its decay does
# not depend on the rate, so it is divided by the rate here.
BATCH, RATE = 1536, 0.205  # Muon's
MOMENTUM = 0.825
BIAS_RATE = 0.0573 * BATCH
DECAY = 1.0418e-6 * BATCH

RECIPE = {
    "global_batch_size": BATCH,
    "epochs": 7.95,  # 259 steps
    "optimizer": "muon",
    "muon_iterations": 3,
    "momentum": 0.655,
    "nesterov": True,
    "learning_rate": RATE,
    "lr_schedule": "linear",
    "label_smoothing": 0.09,
    # Ours.
    "keep_hardest": "2:0.75",
    "ema": 0.0,
    "dtype": "auto",
    "eval_at_end": True,
}
# For each network: further arguments of `inference`, the recipe, --image_sizes.
NETWORKS = {
    "cifar10_94": dict(widths=(64, 256, 256), head=1.5),  # section 3.1; ours: the head moves faster
    "cifar10_95": dict(widths=(128, 384, 384)),  # airbench95
    "cifar10_96": dict(widths=(128, 384, 512), depth=3),  # airbench96
}
RECIPES = {
    "cifar10_94": RECIPE,
    "cifar10_95": RECIPE | {"epochs": 16, "keep_hardest": "3:0.75"},  # 521 steps; airbench95, without Muon, 15 epochs
    "cifar10_96": RECIPE | {"epochs": 38, "keep_hardest": "5:0.7"},  # 1,237 steps; airbench96, without Muon, 37 epochs
}
IMAGE_SIZES = {"cifar10_94": "0:20,1.5:24,4.5:32", "cifar10_95": "0:20,3:24,9:32", "cifar10_96": "0:20,7:24,21:32"}


def head_rate(num_features: int, head: float = 1.0) -> float:
    """Returns the head's learning rate: `head` times the script's, for logits divided by their number of features."""
    return head * 0.5415 * BATCH / (num_features * LOGIT_SCALE) ** 2


def inference_for(examples: Examples, **network):
    """Returns `inference` with a first layer that whitens these examples. network: its other arguments."""
    kernels = initializers.FromExamples(examples, WHITENED_IMAGES, lambda images, labels: whitening.kernels(images))
    return functools.partial(inference, whitening_kernels=kernels, **network)


def inference(
    images: tf.Tensor,
    training: bool,
    whitening_kernels,
    widths: Sequence[int],
    sizes: Mapping[float, int] = FULL_SIZE,
    head: float = 1.0,
    depth: int = 2,
) -> tf.Tensor:
    """Builds the network: images [batch, 32, 32, 3] to logits [batch, 10].

    Args:
      images: normalised; variables and arithmetic have their dtype.
      training: normalise with the batch's statistics, or with the moving ones.
      whitening_kernels: initializer of the first layer's kernels.
      widths: numbers of filters in the three blocks.
      sizes: {epochs seen: pixels each way, from then on}, in training.
      head: the factor of the last layer's learning rate.
      depth: convolutions in each block, 2 or 3; the third has a residual connection from the first one's activation.
    """
    if sizes != FULL_SIZE:
        images = layers.progressive_resize(images, sizes)
    map_sizes = [size - whitening.SIZE + 1 for size in sizes.values()]
    pixels_first = is_by_spectra(images.dtype)  # the fastest order of axes for products of spectra

    def convolved(maps, filters):
        return convolution(maps, _kernels(maps, filters), pixels_first, sizes=map_sizes)

    for number, width in enumerate(widths, start=1):
        with v1.variable_scope(f"block{number}/conv1"):
            if number == 1:
                maps = _begin(images, whitening_kernels, width, map_sizes)
                maps = tf.transpose(maps, [1, 2, 0, 3]) if pixels_first else maps
            else:
                maps = max_pool(convolved(maps, width), 2, pixels_first)
            map_sizes = [size // 2 for size in map_sizes]
            maps = scaled_swish(_normalized(maps, training))
        first = maps
        for conv in range(2, depth + 1):
            with v1.variable_scope(f"block{number}/conv{conv}"):
                normalized = _normalized(convolved(maps, width), training)
                # SiLU of the sum: both are halved.
                maps = scaled_swish(normalized + IN_SILU * first if conv == 3 else normalized)
    # Equal maxima, frequent in bfloat16, share the gradient.
    features = tf.reduce_max(maps, [0, 1] if pixels_first else [1, 2])
    features = tf.cast(features, tf.float32) if features.dtype.size < 4 else features  # logits keep their digits
    rate = head_rate(features.shape[-1], head)
    with v1.variable_scope("head"), _moved_at(rate):
        uniform = v1.variance_scaling_initializer(1 / 3, distribution="uniform")  # PyTorch's default
        weights = layers.weights([features.shape[-1], NUM_CLASSES], features.dtype, uniform, DECAY / rate)
        return tf.matmul(features, weights) * LOGIT_SCALE


@tf.custom_gradient
def scaled_swish(x: tf.Tensor) -> tf.Tensor:
    """x * (1 + tanh(x)), which is 2 x sigmoid(2 x).

    So z * sigmoid(beta z) = scaled_swish(beta z / 2) / beta: SiLU for beta = 1, and for beta = 1.702 the sigmoid
    approximation of GELU (Hendrycks and Gimpel 2016, "Gaussian error linear units", section 2). With u = 1 + tanh(x)
    and y = x u the derivative is u + y (2 - u). Computed in float32 at least: bfloat16 keeps two digits of u,
    and takes longer.
    """
    wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    u = 1 + tf.tanh(wide)
    y = wide * u
    return tf.cast(y, x.dtype), lambda upstream: tf.cast(tf.cast(upstream, wide.dtype) * (u + y * (2 - u)), x.dtype)


def _begin(images: tf.Tensor, whitening_kernels, width: int, sizes: Sequence[int]) -> tf.Tensor:
    """Applies the whitening, the first convolution and its pooling: [batch, 32, 32, 3] to [batch, 15, 15, width]."""
    with v1.variable_scope("whitening"):
        shape = [whitening.SIZE, whitening.SIZE, 3, whitening.NUM_KERNELS]
        with layers.frozen():
            whitening_weights = v1.get_variable("weights", shape, images.dtype, whitening_kernels)
        with _moved_at(BIAS_RATE / 2, WHITENING_BIAS_EPOCHS):
            zeros = v1.zeros_initializer()
            biases = layers.weights([whitening.NUM_KERNELS], images.dtype, zeros, DECAY / BIAS_RATE, "biases")
    whitened = tf.nn.conv2d(images, IN * whitening_weights, 1, "VALID")

    def convolved(biases, weights):
        activated = scaled_swish(tf.nn.bias_add(whitened, IN * biases))
        return convolution(activated, weights, sizes=sizes)

    maps = layers.gradient_until(WHITENING_BIAS_EPOCHS, convolved, biases, _kernels(whitened, width))
    return tf.nn.max_pool2d(maps, 2, 2, "VALID")


def _normalized(maps: tf.Tensor, training: bool) -> tf.Tensor:
    def decay(biases):
        return DECAY / BIAS_RATE * tf.nn.l2_loss(biases)

    with _moved_at(BIAS_RATE):
        return layers.batch_normalization(maps, training, MOVING_MOMENTUM, scale=IN_SILU, regularizer=decay)


def _moved_at(rate: float, until_epoch: float = math.inf):
    """Moves the variables created in this block by momentum, at this rate if --learning_rate is the recipe's."""
    return layers.param_group(rate / RATE, until_epoch, muon=False, momentum=MOMENTUM)


def _kernels(maps: tf.Tensor, filters: int) -> tf.Tensor:
    """Creates a convolution's kernels; each step rescales them to the norm sqrt(filters), as airbench94_muon does."""

    def normed(kernels):
        return kernels * (filters**0.5 / tf.norm(kernels))

    return v1.get_variable("weights", [3, 3, maps.shape[-1], filters], maps.dtype, _PartlyIdentity(), constraint=normed)


class _PartlyIdentity(v1.variance_scaling_initializer):
    """Section 3.3's filters: the first ones each pass on one channel, the others are PyTorch's default."""

    def __init__(self):
        super().__init__(1 / 3, distribution="uniform")

    def __call__(self, shape, dtype=tf.float32, partition_info=None):
        identity = np.zeros([*shape[:-1], shape[-2]])
        identity[shape[0] // 2, shape[1] // 2] = np.eye(shape[-2])
        others = super().__call__(shape, dtype)[..., shape[-2] :]
        return tf.concat([tf.constant(identity, dtype), others], axis=-1)
