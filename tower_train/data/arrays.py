"""Batches out of arrays in memory, or mapped into memory from a file: the public place of `fetcher`."""

from tower_train.examples import fetcher

__all__ = ["fetcher"]
