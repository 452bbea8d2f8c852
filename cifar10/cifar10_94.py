"""The recipe that takes CIFAR-10 to 94 % in ten epochs.

Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498. Sections are the
paper's; "script" is airbench94, which it publishes.
"""

import functools
import math

import numpy as np
import tensorflow as tf

from cifar10 import whitening
from cifar10.convolution import DIRECT, convolution, max_pool
from tower_train import initializers, layers
from tower_train.workload import Examples

v1 = tf.compat.v1

NUM_CLASSES = 10
WIDTHS = 64, 256, 256  # of the three blocks: section 3.1
WHITENED_IMAGES = 5000  # section 3.2: the first training images, whose patches the fixed first layer whitens
WHITENING_BIAS_EPOCHS = 3  # section 3.2: its biases are trained no longer
LOGIT_SCALE = 1 / 9  # script
MOVING_MOMENTUM = 0.6  # of batch normalisation's moving statistics: script
BIAS_RATE = 64.0  # times the learning rate, for the biases of batch normalisation: section 3.4

# gelu(x) = OUT * scaled_gelu(IN * x). Where the layers before and after it multiply anyway, no factor costs a pass.
IN, OUT = 0.851, 1 / 1.702

# The script gives rate and decay for a loss that is a sum, and divides both by what momentum makes of them: by that
# factor here, for a loss that is a mean. The decay is decoupled from the rate, which is therefore divided out.
MOMENTUM = 0.85
RATE, DECAY = 11.5, 0.0153  # per 1024 examples
WEIGHT_DECAY = DECAY / RATE

RECIPE = {  # from the script, if no section is named
    "global_batch_size": 1024,
    "epochs": 9.9,
    "optimizer": "momentum",
    "momentum": MOMENTUM,
    "nesterov": True,
    "learning_rate": RATE / (1 + 1 / (1 - MOMENTUM)),
    "lr_schedule": "points",  # a triangle
    "lr_points": "0:0.2,0.23:1,1:0.07",
    "label_smoothing": 0.2,
    "lookahead_every_steps": 5,  # section 3.4
    "lookahead_decay": 0.95**5,
    "lookahead_ramp": 3.0,
    "moving_average_decay": 0.0,
    "dtype": "auto",
    "eval_at_end": True,
}


def inference_for(examples: Examples):
    """Returns the network, whose first layer whitens these examples."""
    kernels = initializers.FromExamples(examples, WHITENED_IMAGES, lambda images, labels: whitening.kernels(images))
    return functools.partial(inference, whitening_kernels=kernels)


def inference(images: tf.Tensor, training: bool, whitening_kernels) -> tf.Tensor:
    """Builds the network: images [batch, 32, 32, 3] to logits [batch, 10].

    Args:
      images: normalised; variables and arithmetic have their dtype.
      training: normalise with the batch's statistics, or with the moving ones.
      whitening_kernels: initializer of the first layer's kernels.
    """
    pixels_first = not layers.on_gpu()  # the order of axes in which `convolution` is fastest; cuDNN wants the usual one

    def convolved(maps, filters):
        return convolution(maps, _kernels(maps, filters), pixels_first)

    def pooled(maps, size):
        return max_pool(maps, size, pixels_first)

    for number, width in enumerate(WIDTHS, start=1):
        with v1.variable_scope(f"block{number}/conv1"):
            if number == 1:
                maps = _begin(images, whitening_kernels)
                maps = tf.transpose(maps, [1, 2, 0, 3]) if pixels_first else maps
            else:
                maps = pooled(convolved(maps, width), 2)
            maps = scaled_gelu(_normalized(maps, training))
        with v1.variable_scope(f"block{number}/conv2"):
            maps = scaled_gelu(_normalized(convolved(maps, width), training))
    features = tf.squeeze(pooled(maps, 3), [0, 1] if pixels_first else [1, 2])
    with v1.variable_scope("linear"):
        weights = layers.weights([features.shape[-1], NUM_CLASSES], features.dtype, _Uniform(), WEIGHT_DECAY)
        return tf.matmul(features, weights) * (OUT * LOGIT_SCALE)


@tf.custom_gradient
def scaled_gelu(x: tf.Tensor) -> tf.Tensor:
    """x * (1 + tanh(x)).

    That is x * sigmoid(1.702 x), the sigmoid approximation of Hendrycks and Gimpel 2016 ("Gaussian error linear units",
    section 2), which is within 0.021 of x times the normal distribution function, but for the factors IN and OUT.
    TensorFlow has a fast hyperbolic tangent also for bfloat16. With u = 1 + tanh(x) and y = x u the derivative is
    u + y (2 - u).
    """
    u = 1 + tf.tanh(x)
    y = x * u
    return y, lambda upstream: upstream * (u + y * (2 - u))


def _begin(images: tf.Tensor, whitening_kernels) -> tf.Tensor:
    """Applies the whitening, the first convolution and its pooling: [batch, 32, 32, 3] to [batch, 15, 15, width]."""
    with v1.variable_scope("whitening"):
        shape = [whitening.SIZE, whitening.SIZE, 3, whitening.NUM_KERNELS]
        with layers.frozen():
            whitening_weights = v1.get_variable("weights", shape, images.dtype, whitening_kernels)
        with layers.learning(until_epoch=WHITENING_BIAS_EPOCHS):
            zeros = v1.zeros_initializer()
            biases = layers.weights([whitening.NUM_KERNELS], images.dtype, zeros, WEIGHT_DECAY, "biases")
    whitened = tf.nn.conv2d(images, IN * whitening_weights, 1, "VALID")

    def convolved(biases, weights):
        return convolution(scaled_gelu(tf.nn.bias_add(whitened, IN * biases)), weights, usual=DIRECT)

    maps = layers.gradient_until(WHITENING_BIAS_EPOCHS, convolved, biases, _kernels(whitened, WIDTHS[0]))
    return tf.nn.max_pool2d(maps, 2, 2, "VALID")


def _normalized(maps: tf.Tensor, training: bool) -> tf.Tensor:
    with layers.learning(rate_factor=BIAS_RATE):  # whose weight decay is not to be multiplied
        return layers.batch_normalization(maps, training, MOVING_MOMENTUM, scale=IN, regularizer=_decay)


def _kernels(maps: tf.Tensor, filters: int) -> tf.Tensor:
    """Creates the kernels of a convolution of outputs of scaled_gelu."""
    return OUT * layers.weights([3, 3, maps.shape[-1], filters], maps.dtype, _PartlyIdentity(), WEIGHT_DECAY)


def _decay(biases: tf.Tensor) -> tf.Tensor:
    return WEIGHT_DECAY / BIAS_RATE * tf.nn.l2_loss(biases)


class _Uniform:
    """Uniform values within 1 / sqrt(inputs) of 0, PyTorch's default."""

    seed = None  # the trainer's, for each variable its own

    def __call__(self, shape, dtype=tf.float32, partition_info=None):
        limit = math.prod(shape[:-1]) ** -0.5
        return v1.random_uniform_initializer(-limit, limit, self.seed)(shape, dtype)


class _PartlyIdentity(_Uniform):
    """Filters of section 3.3: the first pass on one channel each, the others are random."""

    def __call__(self, shape, dtype=tf.float32, partition_info=None):
        identity = np.zeros([*shape[:-1], shape[-2]])
        identity[shape[0] // 2, shape[1] // 2] = np.eye(shape[-2])
        others = super().__call__(shape, dtype)[..., shape[-2] :]
        return tf.concat([tf.constant(identity, dtype), others], axis=-1)
