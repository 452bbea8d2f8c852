"""The table of names: where those of TensorFlow 1, Keras 2 and Horovod are today."""

import re

_TABLE = """
tensorflow                                       tensorflow.compat.v1
tensorflow.VERSION                               PARTS:VERSION
tensorflow.__version__                           PARTS:VERSION
tensorflow.compat.v2                             tensorflow.compat.v2
tensorflow.estimator                             tower_train.estimator
tensorflow.distribute.MirroredStrategy           PARTS:Strategy
tensorflow.examples
tensorflow.examples.tutorials
tensorflow.examples.tutorials.mnist              tower_train.fronts.tf1.mnist
tensorflow.python.data.experimental.ops.threadpool
tensorflow.python.distribute.all_reduce
tensorflow.python.framework.device.DeviceSpec    tensorflow.compat.v1:DeviceSpec
tensorflow.python.grappler.tf_optimizer.OptimizeGraph  PARTS:OptimizeGraph
tensorflow.python.ops.rnn_cell                   tensorflow.compat.v1:nn.rnn_cell PARTS
tensorflow.python.ops.rnn_cell_impl              tensorflow.compat.v1:nn.rnn_cell PARTS
tensorflow.python.ops.variables.VariableV1       tensorflow.compat.v1:Variable
tensorflow.contrib
tensorflow.contrib.compiler.jit.experimental_jit_scope  tensorflow.compat.v1:xla.experimental.jit_scope
tensorflow.contrib.compiler.jit
tensorflow.contrib.data                          PARTS tensorflow.compat.v1:data.experimental tensorflow.compat.v1:data
tensorflow.contrib.distribute                    PARTS
tensorflow.contrib.estimator                     tower_train.estimator:experimental tower_train.estimator
tensorflow.contrib.framework                     tf_slim.ops.variables tf_slim.ops.arg_scope tensorflow.compat.v1
tensorflow.contrib.framework.arg_scope           tf_slim:arg_scope
tensorflow.contrib.framework.variables           tf_slim.ops.variables
tensorflow.contrib.layers                        tf_slim.layers tf_slim
tensorflow.contrib.learn                         PARTS tower_train.estimator
tensorflow.contrib.lookup                        PARTS tensorflow.python.ops.lookup_ops
tensorflow.contrib.losses                        tf_slim.losses
tensorflow.contrib.metrics                       tf_slim.metrics tensorflow.compat.v1:metrics
tensorflow.contrib.opt                           PARTS
tensorflow.contrib.rnn                           PARTS tensorflow.compat.v1:nn.rnn_cell tensorflow.compat.v1:nn
tensorflow.contrib.seq2seq                       PARTS
tensorflow.contrib.slim                          tf_slim
tensorflow.contrib.slim.nets                     tf_slim.nets
tensorflow.contrib.summary                       tensorflow.python.ops.summary_ops_v2
tensorflow.contrib.summary.create_file_writer    tensorflow.python.ops.summary_ops_v2:create_summary_file_writer
tensorflow.contrib.training                      PARTS tf_slim.training tensorflow.compat.v1:train
tensorflow.contrib.util                          tensorflow.compat.v1 tensorflow.python.framework.tensor_util
keras                                            tf_keras.api._v1.keras
keras.engine                                     tf_keras.api._v1.keras tf_keras.api._v1.keras.layers
keras.estimator.model_to_estimator               tower_train.estimator:model_to_estimator
keras.utils.multi_gpu_model                      tower_train.fronts.tf1.keras_2:multi_gpu_model
horovod
horovod.tensorflow                               tower_train.fronts.tf1.horovod
horovod.tensorflow.mpi_ops                       tower_train.fronts.tf1.horovod
horovod.keras                                    tower_train.fronts.tf1.horovod_keras
horovod.keras.callbacks                          tower_train.fronts.tf1.horovod_keras
"""
_OF_KERAS_3 = """
tensorflow                                       tensorflow tensorflow.compat.v1
tensorflow.__version__                           tensorflow:__version__
keras                                            keras keras._tf_keras.keras
keras.engine                                     keras keras.layers
keras.callbacks                                  tower_train.fronts.tf1.keras_3 keras.callbacks
keras.models                                     tower_train.fronts.tf1.keras_3 keras.models
keras.optimizers                                 tower_train.fronts.tf1.keras_3 keras.optimizers
"""
_OLDER = """mul:multiply sub:subtract neg:negative pack:stack unpack:unstack batch_matmul:matmul select:where
merge_all_summaries:summary.merge_all merge_summary:summary.merge scalar_summary:summary.scalar nn.rnn:nn.static_rnn
histogram_summary:summary.histogram image_summary:summary.image train.SummaryWriter:summary.FileWriter"""  # before 1.0

_ONE_NAME = [  # (a regular expression of the beginning of a name, the name under which the table has it)
    (r"tensorflow\.compat\.v1", "tensorflow"),
    (r"tensorflow\.(python\.|contrib\.)?keras(\.(api|python))?(\.keras)?", "keras"),
    (r"keras\.layers\.(core|convolutional|normalization|advanced_activations|recurrent|merge|pooling|embeddings|noise|"
     r"wrappers|local|convolutional_recurrent|cudnn_recurrent)", "keras.layers"),
    (r"keras\.utils\.\w+_utils", "keras.utils"),
    (r"keras\.engine\.(topology|training|sequential|base_layer|input_layer)", "keras.engine"),
    (r"horovod\.tensorflow\.keras", "horovod.keras"),
    (r"tensorflow\.contrib\.learn\.python\.learn", "tensorflow.contrib.learn"),
    (r"tensorflow\.contrib\.(\w+)\.python(\.(ops|layers|training)(\.\w+(?=\.))?)?", r"tensorflow.contrib.\1"),
    (r"tensorflow\.contrib\.rnn\.(core_)?rnn(_cell)?", "tensorflow.contrib.rnn"),
    (r"tensorflow\.contrib\.slim\.python\.slim", "tensorflow.contrib.slim"),
    (r"tensorflow\.contrib\.learn\.(learn_runner|run_config|estimators)", "tensorflow.contrib.learn"),
    (r"tensorflow\.(contrib\.learn\.datasets|examples\.tutorials\.mnist)(\.mnist|\.base|\.input_data)?",
     "tensorflow.examples.tutorials.mnist"),
]  # fmt: skip

_REPLACED = """
tensorflow.contrib                         nothing: TensorFlow 2 has no contrib; the package tf-slim has its layers
tensorflow.contrib.cluster_resolver        TF_CONFIG, which tower_train reads itself
tensorflow.contrib.crf                     the package tensorflow-addons
tensorflow.contrib.cudnn_rnn               tf.nn.rnn_cell.LSTMCell with tf.nn.dynamic_rnn, or keras.layers.LSTM
tensorflow.contrib.data.batch_and_drop_remainder  Dataset.batch(size, drop_remainder=True)
tensorflow.contrib.distributions           the package tensorflow-probability
tensorflow.contrib.eager                   tf.enable_eager_execution() and tf.GradientTape
tensorflow.contrib.estimator.TowerOptimizer  the optimizer itself
tensorflow.contrib.estimator.replicate_model_fn  the model_fn, with tower_train.estimator.RunConfig(num_gpus=N)
tensorflow.contrib.gan                     the package tensorflow-gan
tensorflow.contrib.graph_editor            tf.recompute_grad, where it made checkpoints of gradients
tensorflow.contrib.image                   tf.image, or the package tensorflow-addons
tensorflow.contrib.layers.real_valued_column  tf.feature_column.numeric_column
tensorflow.contrib.layers.sparse_column_with_hash_bucket  tf.feature_column.categorical_column_with_hash_bucket
tensorflow.contrib.layers.sparse_column_with_keys  tf.feature_column.categorical_column_with_vocabulary_list
tensorflow.contrib.learn.DNNClassifier     tf.estimator.DNNClassifier
tensorflow.contrib.learn.Estimator         tf.estimator.Estimator
tensorflow.contrib.learn.LinearClassifier  tf.estimator.LinearClassifier
tensorflow.contrib.nccl                    tensorflow.python.ops.nccl_ops, or tf.add_n
tensorflow.contrib.quantize                the package tensorflow-model-optimization
tensorflow.contrib.seq2seq                 the package tensorflow-addons
tensorflow.contrib.tensorrt                tensorflow.python.compiler.tensorrt
tensorflow.contrib.tpu                     nothing: there is no TPU here; tf.estimator.Estimator
horovod                                    the names that docs/migration.md tells of
horovod.torch                              torch.nn.parallel.DistributedDataParallel
"""


def _rows(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (row.partition(" ") for row in text.strip().splitlines())}


def homes(of_keras_3: bool) -> dict[str, list[str]]:
    """Returns {name: where it is today, "module" or "module:attribute"; of a module all of which names come}.

    of_keras_3: for a program of Keras without sessions, which keeps today's Keras.
    """
    rows = _rows(_TABLE) | (_rows(_OF_KERAS_3) if of_keras_3 else {})
    older = (pair.split(":") for pair in _OLDER.split())
    rows |= {f"tensorflow.{old}": f"tensorflow.compat.v1:{new}" for old, new in older}
    return {name: value.replace("PARTS", "tower_train.fronts.tf1.parts").split() for name, value in rows.items()}


def one_name(name: str) -> str:
    """Returns the name under which the table has a dotted name of a program, of which some have several."""
    for pattern, replacement in _ONE_NAME:
        name = re.sub(rf"^{pattern}(?=\.|$)", replacement, name)
    return name


def replacement_of(name: str) -> str:
    """Returns what replaced a name that is not there, from the table or from TensorFlow's own."""
    from tensorflow.tools.compatibility import tf_upgrade_v2

    spec, short, replaced = tf_upgrade_v2.TFAPIChangeSpec(), name.replace("tensorflow", "tf", 1), _rows(_REPLACED)
    if short in spec.symbol_renames:
        return spec.symbol_renames[short]
    while name:
        if name in replaced:
            return replaced[name].strip()
        name = name.rpartition(".")[0]
    warning = spec.function_warnings.get(short, ("", ""))[1].replace("<function name>", short)
    return warning or "nothing that TensorFlow's own tables (tf_upgrade_v2) know"
