"""The multi-GPU Estimator: tf.estimator of TensorFlow 1.15, from the library tensorflow-estimator, on towers.

from tower_train import estimator as tf_estimator
"""

import types

from tower_train.fronts.tf_estimator import input_functions, library
from tower_train.fronts.tf_estimator.from_keras import model_to_estimator
from tower_train.fronts.tf_estimator.library import EstimatorSpec, ModeKeys
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.tower_estimator import Estimator, with_towers
from tower_train.fronts.tf_estimator.workers import train_and_evaluate

BaselineClassifier = with_towers(library.baseline.BaselineClassifier)
BaselineEstimator = with_towers(library.baseline.BaselineEstimator)
BaselineRegressor = with_towers(library.baseline.BaselineRegressor)
DNNClassifier = with_towers(library.dnn.DNNClassifier)
DNNEstimator = with_towers(library.dnn.DNNEstimator)
DNNRegressor = with_towers(library.dnn.DNNRegressor)
DNNLinearCombinedClassifier = with_towers(library.dnn_linear_combined.DNNLinearCombinedClassifier)
DNNLinearCombinedEstimator = with_towers(library.dnn_linear_combined.DNNLinearCombinedEstimator)
DNNLinearCombinedRegressor = with_towers(library.dnn_linear_combined.DNNLinearCombinedRegressor)
LinearClassifier = with_towers(library.linear.LinearClassifier)
LinearEstimator = with_towers(library.linear.LinearEstimator)
LinearRegressor = with_towers(library.linear.LinearRegressor)

VocabInfo, WarmStartSettings = library.estimator.VocabInfo, library.estimator.WarmStartSettings
EvalSpec, TrainSpec = library.training.EvalSpec, library.training.TrainSpec
Exporter, BestExporter = library.exporter.Exporter, library.exporter.BestExporter
FinalExporter, LatestExporter = library.exporter.FinalExporter, library.exporter.LatestExporter
add_metrics = library.extenders.add_metrics
classifier_parse_example_spec = library.parsing_utils.classifier_parse_example_spec
regressor_parse_example_spec = library.parsing_utils.regressor_parse_example_spec
get_default_session_config = library.run_config.get_default_session_config
export, inputs = library.export_lib, input_functions

CheckpointSaverHook = library.hooks_of_sessions.CheckpointSaverHook
CheckpointSaverListener = library.hooks_of_sessions.CheckpointSaverListener
FeedFnHook = library.hooks_of_sessions.FeedFnHook
FinalOpsHook = library.hooks_of_sessions.FinalOpsHook
GlobalStepWaiterHook = library.hooks_of_sessions.GlobalStepWaiterHook
LoggingTensorHook = library.hooks_of_sessions.LoggingTensorHook
NanLossDuringTrainingError = library.hooks_of_sessions.NanLossDuringTrainingError
NanTensorHook = library.hooks_of_sessions.NanTensorHook
ProfilerHook = library.hooks_of_sessions.ProfilerHook
SecondOrStepTimer = library.hooks_of_sessions.SecondOrStepTimer
StepCounterHook = library.hooks_of_sessions.StepCounterHook
StopAtStepHook = library.hooks_of_sessions.StopAtStepHook
SummarySaverHook = library.hooks_of_sessions.SummarySaverHook
SessionRunArgs = library.session_run_hook.SessionRunArgs
SessionRunContext = library.session_run_hook.SessionRunContext
SessionRunHook = library.session_run_hook.SessionRunHook
SessionRunValues = library.session_run_hook.SessionRunValues

experimental = types.SimpleNamespace(
    InMemoryEvaluatorHook=library.hooks.InMemoryEvaluatorHook,
    KMeans=with_towers(library.kmeans.KMeansClustering),
    build_raw_supervised_input_receiver_fn=library.export_lib.build_raw_supervised_input_receiver_fn,
    call_logit_fn=library.model_fn.call_logit_fn,
    dnn_logit_fn_builder=library.dnn.dnn_logit_fn_builder,
    linear_logit_fn_builder=library.linear.linear_logit_fn_builder,
    make_early_stopping_hook=library.early_stopping.make_early_stopping_hook,
    make_stop_at_checkpoint_step_hook=library.hooks.make_stop_at_checkpoint_step_hook,
    stop_if_higher_hook=library.early_stopping.stop_if_higher_hook,
    stop_if_lower_hook=library.early_stopping.stop_if_lower_hook,
    stop_if_no_decrease_hook=library.early_stopping.stop_if_no_decrease_hook,
    stop_if_no_increase_hook=library.early_stopping.stop_if_no_increase_hook,
)

__all__ = [
    "BaselineClassifier", "BaselineEstimator", "BaselineRegressor", "BestExporter", "CheckpointSaverHook",
    "CheckpointSaverListener", "DNNClassifier", "DNNEstimator", "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor", "DNNRegressor", "Estimator", "EstimatorSpec",
    "EvalSpec", "Exporter", "FeedFnHook", "FinalExporter", "FinalOpsHook", "GlobalStepWaiterHook", "LatestExporter",
    "LinearClassifier", "LinearEstimator", "LinearRegressor", "LoggingTensorHook", "ModeKeys",
    "NanLossDuringTrainingError", "NanTensorHook", "ProfilerHook", "RunConfig", "SecondOrStepTimer",
    "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook",
    "StopAtStepHook", "SummarySaverHook", "TrainSpec", "VocabInfo", "WarmStartSettings", "add_metrics",
    "classifier_parse_example_spec", "experimental", "export", "get_default_session_config", "inputs",
    "model_to_estimator", "regressor_parse_example_spec", "train_and_evaluate",
]  # fmt: skip
