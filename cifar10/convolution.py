"""A convolution with fewer multiplications: filtering becomes a product, point by point, of transformed sequences.

A filter of five taps on twelve rows takes 60 products of a row and a tap. Seen as polynomials that are multiplied, the
two sequences can be evaluated at some points, multiplied there, and interpolated: 20 products in all. In two dimensions
that is 400 in place of 3600, each of them between all channels and all filters, which is one batched matrix product.
The transforms are products with small constant matrices.

The mathematics is the same. `toom_cook` rounds more than the direct sum: its results err by 2e-5 in float32, where the
direct sum's err by 5e-7 (TensorFloat-32, in which GPUs convolve by default, rounds each factor to 5e-4). `fourier`
rounds no more than the direct sum, and needs more products; it is for bfloat16, which has no digits to lose.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

_POINTS = 0, 1, -1, 3 / 8, -3 / 8, 5 / 4, -5 / 4, 5 / 2, -5 / 2  # and infinity; found by search: they round least


class Filtering(NamedTuple):
    """y[i] = sum_k x[i + k - taps // 2] g[k], with zeros beyond the ends of x, in products of transforms.

    With sums over tile and x's index: y = to_y @ ((of_x @ x) * (of_g @ g)), g's transform being the same in each tile.

    Attributes:
      of_x: float64 [products, tiles, size].
      of_g: float64 [products, taps].
      to_y: float64 [size, products, tiles].
    """

    of_x: np.ndarray
    of_g: np.ndarray
    to_y: np.ndarray


def convolution(inputs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Equals `tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")`, in less time on a CPU.

    It pays where there are many channels and filters, and the filters are not much smaller than the image. On a GPU it
    is that function, since cuDNN chooses among algorithms by itself.

    Args:
      inputs: floating point [batch, height, width, channels]; all but the batch is static.
      weights: [taps, taps, channels, filters]; odd numbers of taps, at most 9.

    Returns:
      [batch, height, width, filters].
    """
    if "GPU" in inputs.device:
        return tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")
    method = fourier if inputs.dtype.size < 4 else toom_cook
    height, width, channels = inputs.shape[1:]
    along_height, along_width = method(height, weights.shape[0]), method(width, weights.shape[1])

    # Points and tiles come first: then all transforms, and the products, are products of matrices as they lie.
    maps = tf.transpose(inputs, [1, 2, 0, 3])
    maps = _along_both([_flat(filtering.of_x, 2) for filtering in (along_height, along_width)], maps)
    kernels = _along_both([along_height.of_g, along_width.of_g], weights)
    points, tiles = zip(*(filtering.of_x.shape[:2] for filtering in (along_height, along_width)), strict=True)
    # The tiles along the width count as examples, those along the height share a kernel: nothing is moved for either.
    maps = tf.reshape(maps, [points[0], tiles[0], points[1], -1, channels])
    maps = tf.matmul(maps, tf.expand_dims(kernels, 1))
    maps = tf.reshape(maps, [points[0] * tiles[0], points[1] * tiles[1], -1, weights.shape[-1]])
    maps = _along_both([_flat(filtering.to_y, 1) for filtering in (along_height, along_width)], maps)
    return tf.transpose(maps, [2, 0, 1, 3])


def toom_cook(size: int, taps: int) -> Filtering:
    """Filtering tile by tile, each by evaluation at ten points.

    From Winograd 1980, "Arithmetic complexity of computations", and Lavin and Gray 2015, "Fast algorithms for
    convolutional neural networks". The product of polynomials with r and m coefficients has the coefficients
    V(n)^-1 ((V(r) g) * (V(m) h)), V(k) being the powers below k of n = r + m - 1 points. As a map of h it has the
    transpose y = V(m)^T ((V(r) g) * (V(n)^-T x)), which is what filters n values of x into m of y.

    Args:
      size: how many numbers are filtered.
      taps: of the filter, an odd number below 10.
    """
    tile = len(_POINTS) + 2 - taps
    powers = np.vander([*_POINTS, 0], len(_POINTS) + 1, increasing=True)
    powers[-1] = 0  # at infinity only the highest coefficient counts

    def evaluation(coefficients):
        matrix = powers[:, :coefficients].copy()
        matrix[-1, -1] = 1
        return matrix

    of_window = np.linalg.inv(evaluation(len(powers))).T
    tiles = -(-size // tile)
    of_x, to_y = np.zeros([len(powers), tiles, size]), np.zeros([size, len(powers), tiles])
    for i in range(tiles):
        first = i * tile - taps // 2
        inside = range(max(first, 0), min(first + len(powers), size))
        of_x[:, i, inside] = of_window[:, np.subtract(inside, first)]
        outputs = range(i * tile, min((i + 1) * tile, size))
        to_y[outputs, :, i] = evaluation(tile).T[: len(outputs)]
    return Filtering(of_x, evaluation(taps), to_y)


def fourier(size: int, taps: int) -> Filtering:
    """Filtering in one tile by discrete Fourier transform, in real numbers.

    The sequence is filtered without wrapping round if the transform has at least size + taps - 1 values. With X and G
    the transforms of x and of g reversed, that of y is X G. Both are of real sequences, so half of the frequencies tell
    the other half. The product of X = a + bi and G = c + di takes three real products (Gauss): with r = (a + b) c,
    s = a (d - c) and t = b (c + d) it is (r - t) + (r + s) i. Frequency 0 and the highest are real and take one.

    Args:
      size: how many numbers are filtered.
      taps: of the filter, an odd number.
    """
    length = 2 * -(-(size + taps - 1) // 2)  # even, so that the highest frequency is real
    frequencies = 2 * np.pi / length * np.arange(length // 2 + 1)
    x = np.exp(-1j * np.outer(frequencies, np.arange(size)))
    g = np.exp(1j * np.outer(frequencies, np.arange(taps) - taps // 2))
    shares = np.where(np.sin(frequencies) > 1e-9, 2, 1) / length  # complex ones stand for their conjugates, too
    y = shares * np.exp(1j * np.outer(np.arange(size), frequencies))
    ends, inner = [0, -1], slice(1, -1)

    def rows(transform, *combinations):
        return np.concatenate([transform.real[ends], *(combination[inner] for combination in combinations)])

    of_x = rows(x, x.real + x.imag, x.real, x.imag)
    of_g = rows(g, g.real, g.imag - g.real, g.real + g.imag)
    to_y = rows(y.T, *(combination.T for combination in (y.real - y.imag, -y.imag, -y.real))).T
    return Filtering(of_x[:, np.newaxis], of_g, to_y[:, :, np.newaxis])


def _along_both(matrices: list[np.ndarray], values: tf.Tensor) -> tf.Tensor:
    """Multiplies [a, height] and [b, width] with [height, width, c, d] along its first two dimensions: [a, b, c, d]."""
    first, second = (matrix.astype(values.dtype.as_numpy_dtype) for matrix in matrices)
    height, width, _, last = values.shape
    values = tf.matmul(first, tf.reshape(values, [height, -1]))
    values = tf.matmul(second, tf.reshape(values, [len(first), width, -1]))
    return tf.reshape(values, [len(first), len(second), -1, last])


def _flat(matrix: np.ndarray, rank_of_rows: int) -> np.ndarray:
    """As a matrix: the first dimensions are its rows, the others its columns."""
    return matrix.reshape(int(np.prod(matrix.shape[:rank_of_rows])), -1)
