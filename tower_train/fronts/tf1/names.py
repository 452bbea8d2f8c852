"""The table of names: where those of TensorFlow 1, Keras 2 and Horovod are today."""

import functools
import re

import numpy as np

ROOTS = {"tensorflow", "keras", "horovod"}
_SHORT = {
    "OURS": "tower_train.fronts.tf1.contrib",
    "HOROVOD": "tower_train.fronts.horovod_keras",
    "V1": "tensorflow.compat.v1",
}
# A name, and where it is: modules or "module:attribute"; of several modules a name is in the first that has it.
# After "use:" stands what replaces a name that is not there, or all names under it. A module without a place is empty:
# programs import it and need nothing from it.
_TABLE = """
tensorflow                                       V1
tensorflow.__version__                           OURS:VERSION
tensorflow.VERSION                               OURS:VERSION
tensorflow.distribute.MirroredStrategy           OURS:Strategy
tensorflow.estimator                             tower_train.estimator
tensorflow.examples.tutorials.mnist              OURS
tensorflow.layers                                use: TF_USE_LEGACY_KERAS=1 in the environment
tensorflow.python.data.experimental.ops.threadpool
tensorflow.python.distribute.all_reduce
tensorflow.python.framework.device.DeviceSpec    V1:DeviceSpec
tensorflow.python.pywrap_tensorflow              tensorflow.python.pywrap_tensorflow V1:train
tensorflow.python.ops.nccl_ops                   OURS
tensorflow.python.ops.rnn_cell                   V1:nn.rnn_cell
tensorflow.python.ops.variables.VariableV1       V1:Variable
tensorflow.contrib                               use: none that is known; the package tf-slim has the layers
tensorflow.contrib.cluster_resolver              V1:distribute.cluster_resolver
tensorflow.contrib.compiler.jit.experimental_jit_scope  V1:xla.experimental.jit_scope
tensorflow.contrib.cudnn_rnn                     use: tf.nn.dynamic_rnn, or keras.layers.LSTM
tensorflow.contrib.data                          OURS V1:data.experimental V1:data
tensorflow.contrib.distribute                    OURS
tensorflow.contrib.distributions                 use: the package tensorflow-probability
tensorflow.contrib.eager                         use: tf.enable_eager_execution() and tf.GradientTape
tensorflow.contrib.estimator                     tower_train.estimator:experimental tower_train.estimator
tensorflow.contrib.estimator.TowerOptimizer      use: the optimizer itself
tensorflow.contrib.estimator.replicate_model_fn  use: the model_fn, with tower_train.estimator.RunConfig(num_gpus=N)
tensorflow.contrib.framework                     tf_slim.ops.variables tf_slim.ops.arg_scope V1 V1:train
tensorflow.contrib.framework.arg_scope           tf_slim:arg_scope
tensorflow.contrib.framework.variables           tf_slim.ops.variables
tensorflow.contrib.gan                           use: the package tensorflow-gan
tensorflow.contrib.graph_editor                  use: tf.recompute_grad, where it made checkpoints of gradients
tensorflow.contrib.layers                        tf_slim.layers tf_slim
tensorflow.contrib.learn                         OURS tower_train.estimator
tensorflow.contrib.lookup                        OURS tensorflow.python.ops.lookup_ops
tensorflow.contrib.losses                        tf_slim.losses
tensorflow.contrib.metrics                       tf_slim.metrics V1:metrics
tensorflow.contrib.metrics.set_ops               tensorflow.python.ops.sets
tensorflow.contrib.nccl                          OURS
tensorflow.contrib.nn                            use: tf.nn, whose losses take labels= and logits=
tensorflow.contrib.opt                           use: the optimizers of tf.train, or of Keras
tensorflow.contrib.opt.LazyAdamOptimizer         OURS:LazyAdamOptimizer
tensorflow.contrib.quantize                      use: the package tensorflow-model-optimization
tensorflow.contrib.rnn.LSTMBlockCell             V1:nn.rnn_cell.BasicLSTMCell
tensorflow.contrib.rnn                           V1:nn.rnn_cell V1:nn
tensorflow.contrib.seq2seq                       OURS
tensorflow.contrib.slim                          tf_slim
tensorflow.contrib.slim.nets                     tf_slim.nets
tensorflow.contrib.staging                       tensorflow.python.ops.data_flow_ops
tensorflow.contrib.summary                       tensorflow.python.ops.summary_ops_v2
tensorflow.contrib.summary.all_summary_ops       V1:summary.all_v2_summary_ops
tensorflow.contrib.summary.create_file_writer    tensorflow.python.ops.summary_ops_v2:create_summary_file_writer
tensorflow.contrib.tpu                           tower_train.estimator:tpu V1:tpu
tensorflow.contrib.training                      OURS tf_slim.training V1:train
tensorflow.contrib.training.HParams              OURS:HParams
tensorflow.contrib.util                          V1 tensorflow.python.framework.tensor_util
keras                                            tf_keras.api._v1.keras
keras.__version__                                tf_keras:__version__
keras.optimizers.TFOptimizer                     tf_keras:optimizers.get
keras.engine                                     tf_keras.api._v1.keras tf_keras.api._v1.keras.layers
keras.estimator.model_to_estimator               tower_train.estimator:model_to_estimator
keras.utils.multi_gpu_model                      tower_train.fronts.tf1.keras_models:multi_gpu_model
horovod                                          HOROVOD
horovod.tensorflow                               HOROVOD
horovod.tensorflow.DistributedGradientTape       use: DistributedOptimizer, in a graph
horovod.tensorflow.mpi_ops                       HOROVOD
horovod.keras                                    HOROVOD
horovod.keras.allreduce                          HOROVOD:allreduce_at_once
horovod.keras.broadcast                          HOROVOD:broadcast_at_once
horovod.keras.callbacks                          HOROVOD
horovod.keras.callbacks.LearningRateScheduleCallback  use: keras.callbacks.LearningRateScheduler
horovod.keras.callbacks.LearningRateWarmupCallback  use: keras.callbacks.LearningRateScheduler, with hvd.size()
horovod.keras.load_model                         use: load_model of Keras, then compile with hvd.DistributedOptimizer
horovod.torch                                    use: torch.nn.parallel.DistributedDataParallel
"""
_OF_KERAS_3 = """
tensorflow                                       tensorflow V1
tensorflow.__version__                           tensorflow:__version__
tensorflow.nn                                    V1:nn
keras                                            keras keras._tf_keras.keras
keras.__version__                                keras:__version__
keras.backend.get_value                          keras:ops.convert_to_numpy
keras.backend.set_value                          keras:Variable.assign
keras.engine                                     keras keras.layers
keras.utils.multi_gpu_model                      tower_train.fronts.multi_gpu_model:multi_gpu_model
"""
# Names that NumPy has dropped, and what they stood for.
OF_NUMPY = {each.__name__: each for each in (int, float, complex, object, str)} | {
    "asscalar": np.ndarray.item,
    "cast": {kind: functools.partial(np.asarray, dtype=kind) for kind in np.sctypeDict.values()},
    "float_": np.float64,
    "Inf": np.inf,
    "NaN": np.nan,
    "product": np.prod,
    "string_": np.bytes_,
    "unicode_": np.str_,
}

_ONE_NAME = [  # (a regular expression of the beginning of a name, the name under which the table has it)
    (r"tensorflow\.compat\.v1", "tensorflow"),
    (r"tensorflow\.python\.estimator(\.(estimator|model_fn|run_config|training))?", "tensorflow.estimator"),
    (r"tensorflow\.(python\.|contrib\.)?keras(\.(api|python))?(\.keras)?", "keras"),
    (
        r"keras\.layers\.(core|convolutional|normalization|advanced_activations|recurrent|merge|pooling|embeddings|noise|"
        r"wrappers|local|convolutional_recurrent|cudnn_recurrent)",
        "keras.layers",
    ),
    (r"keras\.utils\.\w+_utils", "keras.utils"),
    (r"keras\.backend\.tensorflow_backend", "keras.backend"),
    (r"keras\.engine\.(topology|training|sequential|base_layer|input_layer)", "keras.engine"),
    (r"horovod\.tensorflow\.keras", "horovod.keras"),
    (r"tensorflow\.python\.ops\.rnn_cell_impl", "tensorflow.python.ops.rnn_cell"),
    (r"tensorflow\.contrib\.(\w+)\.python(\.(ops|layers|training|learn|slim|tpu))*", r"tensorflow.contrib.\1"),
    (
        r"tensorflow\.contrib\.(\w+)\.((core_)?rnn(_cell)?|hparam|learn_runner|run_config|estimators)",
        r"tensorflow.contrib.\1",
    ),
    (
        r"tensorflow\.(contrib\.learn\.datasets|examples\.tutorials\.mnist)(\.mnist|\.base|\.input_data)?",
        "tensorflow.examples.tutorials.mnist",
    ),
]


def table(uses_keras_3: bool) -> dict[str, str]:
    """Returns {name: its row}. uses_keras_3: for a program of Keras without sessions, which keeps today's Keras."""
    text = _TABLE + _OF_KERAS_3 * uses_keras_3
    for short, module in _SHORT.items():
        text = re.sub(rf"\b{short}\b", module, text)
    return {name: value.strip() for name, _, value in (row.partition(" ") for row in text.strip().splitlines())}


def one_name(name: str) -> str:
    """Returns the table's name for a program's dotted name, as some things have several."""
    for pattern, replacement in _ONE_NAME:
        name = re.sub(rf"^{pattern}(?=\.|$)", replacement, name)
    return name
