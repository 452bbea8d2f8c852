"""Calls for programs in towers; on one device they do nothing. In a Keras model's own `train_step`, `join` gives it the
rows of the whole batch, and `once` does something once. `mean` is a mean over towers, in a `model_fn` too.

from tower_train import steps
"""

from tower_train.fronts.keras_towers.calls import join, mean, once

__all__ = ["join", "mean", "once"]
