"""Custom training steps of Keras models for multi_gpu_model: the requests that a model's `tower_step` yields.

from tower_train import steps
"""

from tower_train.fronts.lockstep.requests import Join, Loss, Once

__all__ = ["Join", "Loss", "Once"]
