"""Kernels that whiten the patches of images: the untrained first layer of a network that trains in minutes.

Jordan 2024 ("94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv 2404.00498, section 3.2).
"""

import numpy as np

from cifar10 import crops

SIZE = 2  # of a patch, in pixels each way
NUM_KERNELS = 2 * SIZE * SIZE * 3
EPSILON = 5e-4

_PIECE = 500  # images whose patches are in memory at a time, 46 MB


def kernels(images: np.ndarray) -> np.ndarray:
    """Divides the eigenvectors of all 2 x 2 patches' covariance by the root of their eigenvalues; adds their negatives.

    On images normalised by `crops.prepare` a convolution with the first half gives 12 uncorrelated channels of variance
    eigenvalue / (eigenvalue + EPSILON), the largest eigenvalue's first. In the first half, each
    eigenvector's largest component is positive.

    From uint8 [n, height, width, 3], before `crops.prepare`, to float32 [rows, columns and channels of a patch, 24].
    """
    count, sums, products = 0, 0.0, 0.0
    for start in range(0, len(images), _PIECE):
        windows = np.lib.stride_tricks.sliding_window_view(images[start : start + _PIECE], (SIZE, SIZE), axis=(1, 2))
        # All patches of all images: [patches, 12], rows before columns before channels.
        patches = np.moveaxis(windows, 3, -1).reshape(-1, SIZE * SIZE * 3).astype(np.float64)
        # Sums of whole numbers below 2^53, which are exact in any order.
        count, sums, products = count + len(patches), sums + patches.sum(axis=0), products + patches.T @ patches
    mean, deviation = sums / count, np.tile(crops.DEVIATION.astype(np.float64), SIZE * SIZE)
    covariance = (products / count - np.outer(mean, mean)) / np.outer(deviation, deviation)
    eigenvalues, eigenvectors = np.linalg.eigh(covariance)
    eigenvalues, eigenvectors = eigenvalues[::-1], eigenvectors[:, ::-1]
    largest = np.abs(eigenvectors).argmax(axis=0)
    eigenvectors = eigenvectors * np.sign(eigenvectors[largest, np.arange(len(largest))])
    whitening = eigenvectors / np.sqrt(eigenvalues + EPSILON)
    both = np.concatenate([whitening, -whitening], axis=1)
    return both.reshape(SIZE, SIZE, 3, NUM_KERNELS).astype(np.float32)
