"""The Estimator front: the library tensorflow-estimator, made to run on today's TensorFlow, and towers."""

import importlib.util

for _package in ("tensorflow_estimator", "tf_keras"):
    if not importlib.util.find_spec(_package):
        raise ImportError(
            f"tower_train.estimator needs the package {_package}: pip install 'tower_train[estimator]' brings it"
        )
