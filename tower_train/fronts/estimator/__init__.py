"""The multi-GPU Estimator; `tower_train.estimator` lists its public names."""
