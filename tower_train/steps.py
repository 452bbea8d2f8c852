"""Calls for a Keras model's own `train_step` in the towers of multi_gpu_model: `join` gives it the rows of the whole
batch, `once` does something once. On one device both do nothing.

from tower_train import steps
"""

from tower_train.fronts.keras_towers.calls import join, once

__all__ = ["join", "once"]
