"""A convolution with fewer multiplications: by the convolution theorem it is one product for each frequency.

Filtering an image of h x w pixels with 3 x 3 taps takes 9 h w products for each channel and filter. Half of the
frequencies of a real image's spectrum determine the other half, and a product of two complex numbers takes three real
ones: with 8 x 8 frequencies, enough for 7 x 7 pixels, that is 94 products instead of 441. Each frequency multiplies
all channels with all filters, so all frequencies together are one batched matrix product. The transforms are products
with small constant matrices, because a fast Fourier transform is no faster for such short sequences.

The result equals that of a direct convolution to 2e-7 in float32. `fastest` chooses between them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import host, layers

_LEAST_CHANNELS = 64  # with 3 or 24 the transforms of the outputs cost 1.5 to 4 times what the products save


class Algorithm(NamedTuple):
    """A way to compute a convolution on a CPU: by products of spectra or directly, and whether in float32.

    `joins`: images are put side by side for the gradient of the weights, see `_joined_convolution`.
    """

    by_spectra: bool
    in_float32: bool = False
    joins: bool = False


# {dtype, or bfloat16 instructions: fastest algorithm}, from timing the layers of convnet and cifar10_94 on two cores.
_FASTEST = {
    "float64": Algorithm(by_spectra=True),
    "float32": Algorithm(by_spectra=True),  # 1.4 to 2.3 times as fast as direct: AMD EPYC with AVX-512
    "float16": Algorithm(by_spectra=True, in_float32=True),  # a spectrum's sums may exceed 65,504
    "bfloat16": Algorithm(by_spectra=True, in_float32=True),  # 2 to 5 times slower than float32: Intel, AVX-512
    "bf16": Algorithm(by_spectra=True),  # ARM's; not measured
    "avx512_bf16": Algorithm(by_spectra=True),  # 1.3 to 2.9 times as fast as direct: AMD EPYC
    "amx_bf16": Algorithm(by_spectra=False, joins=True),  # 1.6 times as fast as by spectra: Intel Xeon
}

# oneDNN sums the weights' gradient row by row, and AMX takes 32 pixels at once: a row of 7 costs as much as one of 32.
_ROW, _WIDEST_JOINED = 32, 12  # beyond 12 pixels, joining costs as much as it saves


class Axes(NamedTuple):
    """Real matrices that transform an image along its first axis, and then along its second.

    Along the first axis the input is real. Frequencies 0 and length / 2 of its spectrum are real too: these are the
    ends. The other frequencies are pairs of conjugates; one of each pair is kept, as a real and an imaginary part.
    Along the second axis, the ends are real sequences, and have such a spectrum again. The others are complex
    sequences, with `length` complex frequencies.
    """

    first: np.ndarray  # of the first axis, [length, size]; in the inverse [size, length]
    # of the real sequences, [2 + 3 (length / 2 - 1), size]: the ends, then three numbers a complex frequency
    ends: np.ndarray
    inner: np.ndarray  # of the complex ones, [3 length, 2 size]: three numbers a frequency, of its two parts


def convolution(
    inputs: tf.Tensor,
    weights: tf.Tensor,
    pixels_first: bool = False,
    algorithm: Algorithm | None = None,
    sizes: Sequence[int] = (),
) -> tf.Tensor:
    """Equals `tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")`, in less time on a CPU.

    On a GPU it is TensorFlow's convolution, since cuDNN chooses among algorithms by itself.

    Args:
      inputs: floating point [batch, height, width, channels]; the channels are static, and so are height and width
        unless `sizes` are given.
      weights: [taps, taps, channels, filters]; odd numbers of taps.
      pixels_first: inputs and outputs are [height, width, batch, ...], the order that spectra need.
      algorithm: on a CPU; None for `fastest`.
      sizes: the heights that inputs may have; they are square then.

    Returns:
      [batch, height, width, filters], or [height, width, batch, filters].
    """
    algorithm = Algorithm(by_spectra=False) if layers.on_gpu() else algorithm or fastest(inputs.dtype, inputs.shape[-1])
    dtype = tf.float32 if algorithm.in_float32 else inputs.dtype
    maps, kernels = tf.cast(inputs, dtype), tf.cast(weights, dtype)
    convolve = _by_spectra if algorithm.by_spectra else _joining if algorithm.joins else _directly
    if pixels_first == algorithm.by_spectra:  # the order that the algorithm takes
        outputs = convolve(maps, kernels, sizes)
    else:
        there, back = ([2, 0, 1, 3], [1, 2, 0, 3]) if pixels_first else ([1, 2, 0, 3], [2, 0, 1, 3])
        outputs = tf.transpose(convolve(tf.transpose(maps, there), kernels, sizes), back)
    return tf.cast(outputs, inputs.dtype)


def fastest(dtype: tf.DType, channels: int) -> Algorithm:
    """Returns the algorithm for inputs of this dtype and number of channels on this processor.

    It depends on the processor in bfloat16 only. Processors round bfloat16 differently anyway, so a run that moves to
    another one rounds differently with any algorithm.
    """
    instructions = host.bfloat16_instructions() if dtype == tf.bfloat16 else None
    algorithm = _FASTEST[instructions or dtype.name]
    return algorithm if channels >= _LEAST_CHANNELS else algorithm._replace(by_spectra=False)


def is_by_spectra(dtype: tf.DType) -> bool:
    """Returns whether `convolution` multiplies spectra on this device, for inputs with enough channels."""
    return not layers.on_gpu() and fastest(dtype, _LEAST_CHANNELS).by_spectra


def _directly(maps: tf.Tensor, weights: tf.Tensor, sizes: Sequence[int] = ()) -> tf.Tensor:
    del sizes
    return tf.nn.conv2d(maps, weights, strides=1, padding="SAME")


def _joined_convolution(counts: Mapping[int, int]) -> Callable:
    """Returns a convolution that puts images side by side for the weights' gradient: a half to a tenth of the time.
    Between them are the zeros that surround an image anyway. counts: {width of the maps: how many images}."""

    @tf.custom_gradient
    def convolve(maps, weights):
        def joined(tensor, count):  # parts of the batch, one beside the other
            parts, gap = tf.split(tensor, count), weights.shape[1] // 2
            zeros = tf.zeros_like(parts[0][:, :, :gap])
            return tf.concat([each for part in parts for each in (part, zeros)], 2) if count > 1 else tensor

        def gradient(upstream):
            same = dict(strides=[1, 1, 1, 1], padding="SAME")

            def weights_grad(count):
                return tf.raw_ops.Conv2DBackpropFilter(
                    input=joined(maps, count), filter_sizes=weights.shape, out_backprop=joined(upstream, count), **same
                )

            maps_grad = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(maps), filter=weights, out_backprop=upstream, **same
            )
            if len(counts) == 1:
                return maps_grad, weights_grad(*counts.values())
            which = tf.argmax(tf.equal(tf.shape(maps)[2], list(counts)), output_type=tf.int32)
            choices = [functools.partial(weights_grad, count) for count in counts.values()]
            return maps_grad, tf.ensure_shape(tf.switch_case(which, choices), weights.shape)

        return _directly(maps, weights), gradient

    return convolve


def _joining(maps: tf.Tensor, weights: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Convolves with the gradient of joined images, if that is faster."""
    batch, _, static_width, _ = maps.shape

    def count(width: int) -> int:  # the most that divide the batch and fit into a row
        most = _ROW // (width + weights.shape[1] // 2) if batch and width <= _WIDEST_JOINED else 1
        return max((number for number in range(2, most + 1) if batch % number == 0), default=1)

    counts = {width: count(width) for width in ([static_width] if static_width else sizes)}
    return (_joined_convolution(counts) if max(counts.values()) > 1 else _directly)(maps, weights)


def _by_spectra(maps: tf.Tensor, weights: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Convolves maps [height, width, batch, channels]."""
    taps = tuple(weights.shape[:2])

    def axes_for(height: int, width: int) -> tuple[Axes, Axes, Axes]:
        constant = functools.partial(tf.constant, dtype=maps.dtype)
        return tf.nest.map_structure(constant, transforms((height, width), taps))

    if maps.shape[:2].is_fully_defined():
        axes = axes_for(*maps.shape[:2])
    else:
        which = tf.argmax(tf.equal(tf.shape(maps)[0], sizes), output_type=tf.int32)
        axes = tf.switch_case(which, [functools.partial(axes_for, size, size) for size in sizes])
    maps_axes, kernel_axes, to_outputs = axes
    factors = zip(_spectrum(maps, maps_axes), _spectrum(weights, kernel_axes), strict=True)
    return _image([tf.matmul(x, g) for x, g in factors], to_outputs)


def max_pool(maps: tf.Tensor, size: int, pixels_first: bool = True) -> tf.Tensor:
    """Takes the greatest value of each size x size window.

    From [height, width, batch, channels] to [height // size, width // size, batch, channels]: windows do not overlap,
    and pixels that fill no window are left out. Without pixels_first the batch comes first.
    """
    if not pixels_first:
        return tf.nn.max_pool2d(maps, size, size, "VALID")
    if maps.dtype in (tf.float64, tf.float16):  # which TensorFlow does not pool in three dimensions on a CPU
        pooled = tf.nn.max_pool2d(tf.transpose(maps, [2, 0, 1, 3]), size, size, "VALID")
        return tf.transpose(pooled, [1, 2, 0, 3])
    # As one three-dimensional image, pooled along two dimensions: for two-dimensional ones the batch must come first.
    window = [1, size, size, 1, 1]
    return tf.squeeze(tf.nn.max_pool3d(tf.expand_dims(maps, 0), window, window, "VALID"), 0)


@functools.lru_cache
def transforms(sizes: tuple[int, int], taps: tuple[int, int]) -> tuple[Axes, Axes, Axes]:
    """Returns the transforms of the maps, of the kernels, and of the products back to the outputs.

    Filtering `size` pixels gives size + taps - 1, and the outermost are not wanted. A shorter transform adds the end to
    the beginning; with a length of at least size + taps // 2, that changes only unwanted pixels.
    """
    # Even lengths, so that the highest frequency is real.
    lengths = [max(4, 2 * -(-(size + count // 2) // 2)) for size, count in zip(sizes, taps, strict=True)]
    maps = [_fourier(length, np.arange(size)) for length, size in zip(lengths, sizes, strict=True)]
    kernels = [_fourier(length, count // 2 - np.arange(count)) for length, count in zip(lengths, taps, strict=True)]
    # The transpose of a Fourier transform is its inverse, but for the sign of the imaginary part and a factor.
    back = _axes(*(each / len(each) for each in maps), lambda p, q: (p + q, q, -p))
    for matrix in back.first, back.ends:
        matrix[2:] *= 2  # for the conjugates, which are left out
    return (
        _axes(*maps, lambda a, b: (a + b, a, b)),
        _axes(*kernels, lambda c, d: (c, d - c, c + d)),
        Axes(*(matrix.T for matrix in back)),
    )


def _fourier(length: int, places: np.ndarray) -> np.ndarray:
    """Returns the discrete Fourier transform of values at these places, complex [length, places]."""
    return np.exp(-1j * np.outer(2 * np.pi / length * np.arange(length), places))


def _axes(first: np.ndarray, second: np.ndarray, factors: Callable) -> Axes:
    """Makes the real matrices of two axes' complex transforms, [length, size] each.

    The product of a + bi and c + di is (r - t) + (r + s) i, with Gauss's three products r = (a + b) c, s = a (d - c)
    and t = b (c + d). The real part of that times p - qi is (p + q) r + q s - p t. `factors` makes the three factors of
    one side from real and imaginary part.
    """
    ends, inner = _ends_and_inner(first)
    pairs = np.stack([inner.real, inner.imag], axis=1).reshape(2 * len(inner), -1)
    second_ends, second_inner = _ends_and_inner(second)
    real, imaginary = np.hstack([second.real, -second.imag]), np.hstack([second.imag, second.real])
    return Axes(
        np.concatenate([ends, pairs]),
        np.concatenate([second_ends, *factors(second_inner.real, second_inner.imag)]),
        np.concatenate(factors(real, imaginary)),
    )


def _ends_and_inner(transform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows of frequencies into the ends (0 and the highest) and those between; the rest are conjugates."""
    half = len(transform) // 2
    return transform[[0, half]].real, transform[1:half]


def _spectrum(values: tf.Tensor, axes: Axes) -> tuple[tf.Tensor, tf.Tensor]:
    """Transforms [height, width, c, d] to the factors: [2 * points, c, d] and [sequences * points, c, d]."""
    height, width, *last = _shape(values)
    length = _shape(axes.first)[0]
    ends, inner = tf.split(tf.matmul(axes.first, tf.reshape(values, [height, -1])), [2, length - 2])
    ends = tf.matmul(axes.ends, tf.reshape(ends, [2, width, -1]))
    inner = tf.matmul(axes.inner, tf.reshape(inner, [length // 2 - 1, 2 * width, -1]))
    return tuple(tf.reshape(part, [_shape(part)[0] * _shape(part)[1], *last]) for part in (ends, inner))


def _image(products: list[tf.Tensor], axes: Axes) -> tf.Tensor:
    """Transforms the products, [2 * points, batch, filters] and so on, to [height, width, batch, filters]."""
    (height, length), (width, num_ends), num_inner = _shape(axes.first), _shape(axes.ends), _shape(axes.inner)[1]
    ends = tf.matmul(axes.ends, tf.reshape(products[0], [2, num_ends, -1]))
    inner = tf.matmul(axes.inner, tf.reshape(products[1], [length // 2 - 1, num_inner, -1]))
    rows = tf.concat([tf.reshape(ends, [2, -1]), tf.reshape(inner, [length - 2, -1])], axis=0)
    return tf.reshape(tf.matmul(axes.first, rows), [height, width, -1, products[0].shape[-1]])


def _shape(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Returns the sizes of the axes: numbers if static, else scalars."""
    return [tf.shape(tensor)[i] if size is None else size for i, size in enumerate(tensor.shape)]
