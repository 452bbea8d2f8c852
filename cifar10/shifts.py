"""Whole images for the networks of cifar10_94. For training they are shifted by up to two or four pixels, flipped in
every other epoch, changed in brightness and contrast, and some have a square cut out; in evaluations, doubtful ones
get six views.

Jordan 2024 ("94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498, section 3.6): an image that is flipped
at random in each epoch often has the same orientation twice in a row. So each is flipped at random in the first epoch
only, and then alternates.
"""

import tensorflow as tf

from cifar10 import crops
from tower_train import workload
from tower_train.data import augmentation

SIZE = crops.SIZE
MOST, MOST_WITH_CUTOUT = 2, 4  # pixels each way that an image is shifted
CUTOUT = 12  # pixels each way of the square that is cut out
DOUBT = 0.7  # if the two largest probabilities differ by less, an image gets six views
BRIGHTNESS, CONTRAST = 0.1399, 0.1308  # most change, of images as `crops.prepare` makes them (see cifar10_94, "script")


def augment(images: tf.Tensor, draws: workload.Draws, most: int = MOST) -> tf.Tensor:
    """Shifts images by up to `most` pixels each way, flips each in every other epoch, does `crops.prepare`, and changes
    brightness and contrast.

    From uint8 [batch, 32, 32, 3] to float32, reflected at the edge as by numpy's 'reflect'. A gather of pixels is
    several times faster than padding and `crop_and_resize`. It takes float32 and int64 places: GPUs gather no uint8
    and compute with int32 on the host.
    """
    images = tf.cast(images, tf.float32)
    places = tf.cast(tf.floor((2 * most + 1) * draws.uniform("shift", 2)), tf.int64) - most
    first_flip = tf.cast(draws.per_example("flip", 1) < 0.5, tf.int64)
    is_flipped = (first_flip + draws.epochs[:, tf.newaxis]) % 2 > 0
    forwards = tf.range(SIZE, dtype=tf.int64)
    rows = _reflected(forwards + places[:, :1])
    columns = _reflected(tf.where(is_flipped, SIZE - 1 - forwards, forwards) + places[:, 1:])
    shifted = crops.gather(images, rows, columns)
    change = 2 * draws.uniform("colours", 2)[:, :, tf.newaxis, tf.newaxis] - 1
    brighter = crops.prepare(shifted) + BRIGHTNESS * change[:, :1]
    return brighter * (1 + CONTRAST * change[:, 1:])


def augment_with_cutout(images: tf.Tensor, draws: workload.Draws) -> tf.Tensor:
    """Augments like `augment`, with shifts of up to 4 pixels, and cuts a square of 12 x 12 pixels out of each image.

    As in airbench96 (see cifar10_94): cutout (DeVries and Taylor 2017, arXiv 1708.04552) with the whole square inside
    the image, filled with 0, the mean colour.
    """
    moved = augment(images, draws, MOST_WITH_CUTOUT)
    top, left = tf.unstack(tf.floor((SIZE - CUTOUT + 1) * draws.uniform("cutout", 2)), axis=1)
    side = tf.constant([CUTOUT], tf.float32)
    is_cut = augmentation.inside((side, side, top, left), (SIZE, SIZE))
    return tf.where(is_cut, tf.zeros([], moved.dtype), moved)


def views(images: tf.Tensor) -> list[tuple[float, tf.Tensor]]:
    """Returns six views of each image (Jordan 2024, section 3.5), as (weight, images of the same shape and dtype).

    The image and its mirror image at 1/4 each, and both one pixel up and to the left, and one down and to the right, at
    1/8 each, reflected at the edge. `images` are those of `crops.prepare`.
    """
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    weighted = [(1 / 4, images), (1 / 8, padded[:, 2:, 2:]), (1 / 8, padded[:, :-2, :-2])]
    return weighted + [(weight, tf.reverse(view, [2])) for weight, view in weighted]


def unsure(logits: tf.Tensor) -> tf.Tensor:
    """Returns which images, bool [batch], are in doubt after the first view's logits [batch, classes]: a quarter of
    them if the network classifies 94 % correctly."""
    best = tf.math.top_k(tf.nn.softmax(tf.cast(logits, tf.float32)), 2).values
    return best[:, 0] - best[:, 1] < DOUBT


def _reflected(places: tf.Tensor) -> tf.Tensor:
    """Reflects rows or columns up to SIZE - 1 beyond the image's edges into it."""
    last = SIZE - 1
    return last - tf.abs(last - tf.abs(places))
