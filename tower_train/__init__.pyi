"""The public names of `tower_train` and their modules: for type checkers and editors, and for __init__.py."""

from tower_train import cluster as cluster
from tower_train import data as data
from tower_train import estimator as estimator
from tower_train import initializers as initializers
from tower_train import layers as layers
from tower_train import steps as steps
from tower_train import workloads as workloads
from tower_train.config import Config as Config
from tower_train.config import EvaluateOptions as EvaluateOptions
from tower_train.config import ExportOptions as ExportOptions
from tower_train.errors import UserError as UserError
from tower_train.examples import DataRequest as DataRequest
from tower_train.examples import Examples as Examples
from tower_train.examples import Weighted as Weighted
from tower_train.fronts.distributed import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from tower_train.fronts.distributed import DistributedOptimizer as DistributedOptimizer
from tower_train.fronts.keras_network import keras_network as keras_network
from tower_train.fronts.multi_gpu_model import multi_gpu_model as multi_gpu_model
from tower_train.graph.gradients import average_gradients as average_gradients
from tower_train.graph.towers import tower_loss as tower_loss
from tower_train.inference.curves import draw_curves as draw_curves
from tower_train.inference.evaluator import Evaluation as Evaluation
from tower_train.inference.saved_model import export_run as export_run
from tower_train.inference.saved_run import evaluate_run as evaluate_run
from tower_train.measures import classification_metrics as classification_metrics
from tower_train.measures import mean_squared_error as mean_squared_error
from tower_train.measures import regression_metrics as regression_metrics
from tower_train.measures import softmax_cross_entropy as softmax_cross_entropy
from tower_train.run.results import Result as Result
from tower_train.run.train import train as train
from tower_train.run.train import training_steps as training_steps
from tower_train.workload import Workload as Workload

__version__: str
