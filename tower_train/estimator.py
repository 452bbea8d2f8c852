"""The multi-GPU Estimator: tf.estimator of TensorFlow 1.15, from the library tensorflow-estimator, on towers.

from tower_train import estimator as tf_estimator
"""

import types

from tower_train.fronts.tf_estimator import library  # isort: skip - makes it possible to import the library
from tensorflow_estimator._api.v1.estimator import *  # noqa: F403

from tower_train.fronts.tf_estimator.proof import check  # noqa: F401
from tower_train.fronts.tf_estimator.tower_estimator import Estimator, TPUEstimator, model_to_estimator, on_towers  # noqa: F401
from tower_train.fronts.tf_estimator.workers import RunConfig, TPURunConfig, train_and_evaluate  # noqa: F401

globals().update(on_towers(library.api), Estimator=Estimator)
experimental = types.SimpleNamespace(**vars(library.api.experimental) | on_towers(library.api.experimental))
tpu = types.SimpleNamespace(**vars(library.api.tpu) | {"RunConfig": TPURunConfig, "TPUEstimator": TPUEstimator})
get_default_session_config = library.run_config.get_default_session_config
