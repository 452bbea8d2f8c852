"""The multi-GPU Estimator: the names of TensorFlow 1.15's tf.estimator.

from tower_train import estimator as tf_estimator
"""

import tensorflow as tf

from tower_train.fronts.tf_estimator import experimental
from tower_train.fronts.tf_estimator import input_functions as inputs
from tower_train.fronts.tf_estimator import receivers as export
from tower_train.fronts.tf_estimator.canned import (
    BaselineClassifier,
    BaselineRegressor,
    DNNClassifier,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    LinearClassifier,
    LinearRegressor,
)
from tower_train.fronts.tf_estimator.experimental import add_metrics
from tower_train.fronts.tf_estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from tower_train.fronts.tf_estimator.feature_columns import classifier_parse_example_spec, regressor_parse_example_spec
from tower_train.fronts.tf_estimator.from_keras import model_to_estimator
from tower_train.fronts.tf_estimator.run_config import RunConfig, WarmStartSettings, get_default_session_config
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys
from tower_train.fronts.tf_estimator.tower_estimator import Estimator
from tower_train.fronts.tf_estimator.train_and_evaluate import EvalSpec, TrainSpec, train_and_evaluate

VocabInfo = tf.compat.v1.train.VocabInfo
CheckpointSaverHook = tf.compat.v1.train.CheckpointSaverHook
CheckpointSaverListener = tf.compat.v1.train.CheckpointSaverListener
FeedFnHook = tf.compat.v1.train.FeedFnHook
FinalOpsHook = tf.compat.v1.train.FinalOpsHook
GlobalStepWaiterHook = tf.compat.v1.train.GlobalStepWaiterHook
LoggingTensorHook = tf.compat.v1.train.LoggingTensorHook
NanLossDuringTrainingError = tf.compat.v1.train.NanLossDuringTrainingError
NanTensorHook = tf.compat.v1.train.NanTensorHook
ProfilerHook = tf.compat.v1.train.ProfilerHook
SecondOrStepTimer = tf.compat.v1.train.SecondOrStepTimer
SessionRunArgs = tf.compat.v1.train.SessionRunArgs
SessionRunContext = tf.compat.v1.train.SessionRunContext
SessionRunHook = tf.compat.v1.train.SessionRunHook
SessionRunValues = tf.compat.v1.train.SessionRunValues
StepCounterHook = tf.compat.v1.train.StepCounterHook
StopAtStepHook = tf.compat.v1.train.StopAtStepHook
SummarySaverHook = tf.compat.v1.train.SummarySaverHook

__all__ = [
    "BaselineClassifier", "BaselineRegressor", "BestExporter", "CheckpointSaverHook", "CheckpointSaverListener",
    "DNNClassifier", "DNNLinearCombinedClassifier", "DNNLinearCombinedRegressor", "DNNRegressor", "Estimator",
    "EstimatorSpec", "EvalSpec", "Exporter", "FeedFnHook", "FinalExporter", "FinalOpsHook", "GlobalStepWaiterHook",
    "LatestExporter", "LinearClassifier", "LinearRegressor", "LoggingTensorHook", "ModeKeys",
    "NanLossDuringTrainingError", "NanTensorHook", "ProfilerHook", "RunConfig", "SecondOrStepTimer",
    "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook",
    "StopAtStepHook", "SummarySaverHook", "TrainSpec", "VocabInfo", "WarmStartSettings", "add_metrics",
    "classifier_parse_example_spec", "experimental", "export", "get_default_session_config", "inputs",
    "model_to_estimator", "regressor_parse_example_spec", "train_and_evaluate",
]  # fmt: skip
