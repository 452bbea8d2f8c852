"""What a `train_step` of a Keras model's own may say to the towers of multi_gpu_model: that it needs the rows of the
whole batch, and what is done once. On one device both do nothing.

from tower_train import steps
"""

from tower_train.fronts.lockstep.step import join, once

__all__ = ["join", "once"]
