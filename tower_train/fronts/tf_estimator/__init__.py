"""The multi-GPU Estimator, by TensorFlow 1.15's names; `tower_train.estimator` lists the public ones."""
