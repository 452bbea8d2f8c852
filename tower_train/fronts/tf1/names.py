"""The table of names: where those of TensorFlow 1, Keras 2 and Horovod are today, as "module:attribute"."""

import re

CONTRIB = "tensorflow.contrib"
PARTS = "tower_train.fronts.tf1.parts"

_ONE_NAME = [  # (regular expression of the beginning of a name, the name under which the tables have it)
    (r"tensorflow\.compat\.v1(?=\.|$)", "tensorflow"),
    (r"tensorflow\.(python\.|contrib\.)?keras(\.(api|python))?(\.keras)?(?=\.|$)", "keras"),
    (r"keras\.layers\.(core|convolutional|normalization|advanced_activations|recurrent|merge|pooling|embeddings|noise|"
     r"wrappers|local|convolutional_recurrent|cudnn_recurrent)(?=\.|$)", "keras.layers"),
    (r"keras\.utils\.(np_utils|generic_utils|data_utils|vis_utils|layer_utils|training_utils|multi_gpu_utils|io_utils)"
     r"(?=\.|$)", "keras.utils"),
    (r"keras\.(engine(\.(topology|training|sequential|base_layer|input_layer))?)(?=\.|$)", "keras.engine"),
    (r"horovod\.tensorflow\.keras(?=\.|$)", "horovod.keras"),
    (r"tensorflow\.contrib\.learn\.python\.learn(?=\.|$)", "tensorflow.contrib.learn"),
    (r"tensorflow\.contrib\.learn(\.learn_runner|\.run_config|\.estimators)(?=\.|$)", "tensorflow.contrib.learn"),
    (r"tensorflow\.(contrib\.learn\.datasets(\.mnist|\.base)?|examples\.tutorials\.mnist(\.input_data|\.base)?)(?=\.|$)",
     "tensorflow.examples.tutorials.mnist"),
    (r"tensorflow\.contrib\.(\w+)\.python\.(ops|layers|training)(\.\w+(?=\.))?(?=\.|$)", r"tensorflow.contrib.\1"),
    (r"tensorflow\.contrib\.slim\.python\.slim(\.nets)?(?=\.|$)", r"tensorflow.contrib.slim\1"),
]  # fmt: skip

MODULES = {  # {module of a program: the modules of today in which its names are, the first one first}
    "tensorflow": ["tensorflow.compat.v1"],
    "tensorflow.estimator": ["tower_train.estimator"],
    "tensorflow.examples": [],
    "tensorflow.examples.tutorials": [],
    "tensorflow.examples.tutorials.mnist": ["tower_train.fronts.tf1.mnist"],
    CONTRIB: [],
    f"{CONTRIB}.data": ["tensorflow.compat.v1:data.experimental"],
    f"{CONTRIB}.distribute": ["tower_train.fronts.tf1.strategies"],
    f"{CONTRIB}.estimator": ["tower_train.estimator:experimental", "tower_train.estimator"],
    f"{CONTRIB}.framework": ["tf_slim.ops.variables", "tf_slim.ops.arg_scope", "tensorflow.compat.v1"],
    f"{CONTRIB}.layers": ["tf_slim.layers", "tf_slim"],
    f"{CONTRIB}.learn": [PARTS, "tower_train.estimator"],
    f"{CONTRIB}.lookup": ["tensorflow.python.ops.lookup_ops"],
    f"{CONTRIB}.losses": ["tf_slim.losses"],
    f"{CONTRIB}.metrics": ["tf_slim.metrics", "tensorflow.compat.v1:metrics"],
    f"{CONTRIB}.nccl": [PARTS],
    f"{CONTRIB}.opt": [PARTS],
    f"{CONTRIB}.rnn": ["tensorflow.compat.v1:nn.rnn_cell", "tensorflow.compat.v1:nn"],
    f"{CONTRIB}.seq2seq": [PARTS],
    f"{CONTRIB}.slim": ["tf_slim"],
    f"{CONTRIB}.slim.nets": ["tf_slim.nets"],
    f"{CONTRIB}.summary": ["tensorflow.python.ops.summary_ops_v2"],
    f"{CONTRIB}.training": [PARTS, "tf_slim.training", "tensorflow.compat.v1:train"],
    f"{CONTRIB}.util": ["tensorflow.compat.v1", "tensorflow.python.framework.tensor_util"],
    "tensorflow.python.distribute.all_reduce": [],  # gone; imported, but hardly used
    "tensorflow.python.data.experimental.ops.threadpool": [PARTS],
    "keras": ["tf_keras.api._v1.keras"],
    "keras.engine": ["tf_keras.api._v1.keras", "tf_keras.api._v1.keras.layers"],
    "horovod": [],
    "horovod.tensorflow": ["tower_train.fronts.tf1.horovod"],
    "horovod.keras": ["tower_train.fronts.tf1.horovod"],
    "horovod.keras.callbacks": ["tower_train.fronts.tf1.horovod"],
}

MODULES_OF_KERAS_3 = {  # the same in a program of Keras without sessions
    "tensorflow": ["tensorflow", "tensorflow.compat.v1"],
    "keras": ["keras", "keras._tf_keras.keras"],
    "keras.engine": ["keras", "keras.layers"],
}

_OLDER = {  # of TensorFlow before 1.0
    "mul": "multiply", "sub": "subtract", "neg": "negative", "pack": "stack", "unpack": "unstack",
    "batch_matmul": "matmul", "select": "where", "merge_all_summaries": "summary.merge_all",
    "merge_summary": "summary.merge", "scalar_summary": "summary.scalar", "histogram_summary": "summary.histogram",
    "image_summary": "summary.image", "train.SummaryWriter": "summary.FileWriter", "nn.rnn": "nn.static_rnn",
}  # fmt: skip
NAMES = {  # {name of a program: where it is today}
    **{f"tensorflow.{old}": f"tensorflow.compat.v1:{new}" for old, new in _OLDER.items()},
    "tensorflow.__version__": f"{PARTS}:VERSION",
    "tensorflow.VERSION": f"{PARTS}:VERSION",
    "tensorflow.compat.v2": "tensorflow.compat.v2",
    "tensorflow.distribute.MirroredStrategy": "tower_train.fronts.tf1.strategies:MirroredStrategy",
    "tensorflow.python.ops.variables.VariableV1": "tensorflow.compat.v1:Variable",
    "tensorflow.python.ops.rnn_cell": "tensorflow.compat.v1:nn.rnn_cell",
    "tensorflow.python.ops.rnn_cell_impl": "tensorflow.compat.v1:nn.rnn_cell",
    "tensorflow.python.framework.device.DeviceSpec": "tensorflow.compat.v1:DeviceSpec",
    "tensorflow.python.grappler.tf_optimizer.OptimizeGraph": f"{PARTS}:OptimizeGraph",
    "keras.utils.multi_gpu_model": "tower_train.fronts.tf1.keras_2:multi_gpu_model",
    "keras.estimator.model_to_estimator": "tower_train.estimator:model_to_estimator",
    f"{CONTRIB}.data.AUTOTUNE": "tensorflow.data:AUTOTUNE",
    f"{CONTRIB}.data.Dataset": "tensorflow.compat.v1:data.Dataset",
    f"{CONTRIB}.data.TFRecordDataset": "tensorflow.compat.v1:data.TFRecordDataset",
    f"{CONTRIB}.data.TextLineDataset": "tensorflow.compat.v1:data.TextLineDataset",
    f"{CONTRIB}.data.Iterator": "tensorflow.compat.v1:data.Iterator",
    f"{CONTRIB}.data.batch_and_drop_remainder": f"{PARTS}:batch_and_drop_remainder",
    f"{CONTRIB}.estimator.add_metrics": "tower_train.estimator:add_metrics",
    f"{CONTRIB}.framework.nest": "tensorflow:nest",
    f"{CONTRIB}.learn.RunConfig": "tower_train.estimator:RunConfig",
    f"{CONTRIB}.learn.ModeKeys": "tower_train.estimator:ModeKeys",
    f"{CONTRIB}.lookup.index_table_from_tensor": f"{PARTS}:index_table_from_tensor",
    f"{CONTRIB}.lookup.index_to_string_table_from_tensor": f"{PARTS}:index_to_string_table_from_tensor",
    f"{CONTRIB}.rnn.LSTMBlockCell": f"{PARTS}:LSTMBlockCell",
    f"{CONTRIB}.summary.create_file_writer": "tensorflow.python.ops.summary_ops_v2:create_summary_file_writer",
}
NAMES_OF_KERAS_3 = {
    "tensorflow.__version__": "tensorflow:__version__",
    **{f"keras.optimizers.{name}": f"tower_train.fronts.tf1.keras_3:{name}"
       for name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam")},
    **{f"keras.callbacks.{name}": f"tower_train.fronts.tf1.keras_3:{name}"
       for name in ("ModelCheckpoint", "ReduceLROnPlateau", "EarlyStopping")},
}  # fmt: skip

REPLACED = {  # {name that is not there, or the beginning of some: what to use}
    "tensorflow.nn.seq2seq": "tf.contrib.seq2seq's successors are in the package tensorflow-addons",
    f"{CONTRIB}.tpu": "there is no TPU here: tf.estimator.Estimator with tower_train.estimator.RunConfig(num_gpus=N)",
    f"{CONTRIB}.cluster_resolver": "TF_CONFIG, which tower_train reads itself",
    f"{CONTRIB}.cudnn_rnn": "tf.nn.rnn_cell.LSTMCell with tf.nn.dynamic_rnn, or keras.layers.LSTM",
    f"{CONTRIB}.crf": "the package tensorflow-addons had it",
    f"{CONTRIB}.distributions": "the package tensorflow-probability",
    f"{CONTRIB}.eager": "tf.enable_eager_execution() and tf.GradientTape",
    f"{CONTRIB}.estimator.replicate_model_fn": "the model_fn itself, with tower_train.estimator.RunConfig(num_gpus=N)",
    f"{CONTRIB}.estimator.TowerOptimizer": "the optimizer itself",
    f"{CONTRIB}.gan": "the package tensorflow-gan",
    f"{CONTRIB}.image": "tf.image, or the package tensorflow-addons",
    f"{CONTRIB}.layers.real_valued_column": "tf.feature_column.numeric_column",
    f"{CONTRIB}.layers.sparse_column_with_hash_bucket": "tf.feature_column.categorical_column_with_hash_bucket",
    f"{CONTRIB}.layers.sparse_column_with_keys": "tf.feature_column.categorical_column_with_vocabulary_list",
    f"{CONTRIB}.learn.Estimator": "tf.estimator.Estimator",
    f"{CONTRIB}.learn.DNNClassifier": "tf.estimator.DNNClassifier",
    f"{CONTRIB}.learn.LinearClassifier": "tf.estimator.LinearClassifier",
    f"{CONTRIB}.quantize": "the package tensorflow-model-optimization",
    f"{CONTRIB}.resampler": "tf.gather_nd, or the package tensorflow-addons",
    f"{CONTRIB}.seq2seq": "the package tensorflow-addons",
    f"{CONTRIB}.tensorrt": "tensorflow.python.compiler.tensorrt",
    f"{CONTRIB}.trt": "tensorflow.python.compiler.tensorrt",
    "horovod.torch": "torch.nn.parallel.DistributedDataParallel",
    "horovod.keras.callbacks": "BroadcastGlobalVariablesCallback and MetricAverageCallback are there; keras.callbacks",
    "horovod": "see docs/migration.md for the names of Horovod that are here",
    CONTRIB: "tf.contrib is gone since TensorFlow 2; the package tf-slim has its layers, framework, losses and metrics",
}


def one_name(name: str) -> str:
    """Returns the name under which the tables have a dotted name of a program, of which some have several."""
    for pattern, replacement in _ONE_NAME:
        name = re.sub("^" + pattern, replacement, name)
    return name


def replacement_of(name: str) -> str:
    """Returns what replaced a name that is not there, from the table or from TensorFlow's own."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        if advice := REPLACED.get(".".join(parts[:count])):
            return advice
    from tensorflow.tools.compatibility import tf_upgrade_v2

    spec, short = tf_upgrade_v2.TFAPIChangeSpec(), name.replace("tensorflow", "tf", 1)
    if short in spec.symbol_renames:
        return spec.symbol_renames[short]
    warning = spec.function_warnings.get(short, ("", ""))[1].replace("<function name>", short)
    return warning or REPLACED.get(parts[0], "nothing that TensorFlow's own tables (tf_upgrade_v2) know")
