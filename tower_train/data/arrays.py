"""Batches from arrays in memory or mapped from a file: the public place of `fetcher`."""

from tower_train.arrays import fetcher

__all__ = ["fetcher"]
