"""Parts of tf.contrib that no package of today has, in short."""

import ast
import json
import types

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import lookup_ops, nccl_ops

from tower_train.fronts.tf_estimator import library, workers

v1 = tf.compat.v1
VERSION = "1.15.5"  # programs compare it
_DEFAULT_UID_WHITE_LIST = []  # of tf.contrib.learn.RunConfig


def batch_and_drop_remainder(batch_size):
    """tf.contrib.data's, for Dataset.apply."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def index_table_from_tensor(mapping, *args, **kwargs):
    """tf.contrib.lookup's."""
    return lookup_ops.index_table_from_tensor(mapping, *args, **kwargs)


def index_to_string_table_from_tensor(mapping, *args, **kwargs):
    """tf.contrib.lookup's."""
    return lookup_ops.index_to_string_table_from_tensor(mapping, *args, **kwargs)


class LSTMBlockCell(v1.nn.rnn_cell.LSTMCell):
    """tf.contrib.rnn's, by the plain cell; its variables have other names."""

    def __init__(self, num_units, forget_bias=1.0, cell_clip=None, use_peephole=False, **kwargs):
        super().__init__(num_units, use_peepholes=use_peephole, cell_clip=cell_clip, forget_bias=forget_bias, **kwargs)


def sequence_loss(
    logits, targets, weights, average_across_timesteps=True, average_across_batch=True, softmax_loss_function=None,
    name=None,
):  # fmt: skip
    """tf.contrib.seq2seq's: the weighted cross-entropy of [batch, time, classes] logits."""
    with v1.name_scope(name, "sequence_loss"):
        loss = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = loss(labels=targets, logits=logits) * weights
        if average_across_timesteps and average_across_batch:
            return tf.reduce_sum(losses) / (tf.reduce_sum(weights) + 1e-12)
        axes = [axis for axis, averaged in enumerate((average_across_batch, average_across_timesteps)) if averaged]
        return tf.reduce_sum(losses, axes) / (tf.reduce_sum(weights, axes) + 1e-12) if axes else losses


def OptimizeGraph(config, metagraph, *args, **kwargs):  # noqa: N802
    """Grappler's, which took the RewriterConfig alone."""
    if isinstance(config, rewriter_config_pb2.RewriterConfig):
        config.meta_optimizer_iterations = config.ONE  # a second pass over its own result fails
        config = v1.ConfigProto(graph_options=v1.GraphOptions(rewrite_options=config))
    return tf_optimizer.OptimizeGraph(config, metagraph, *args, **kwargs)


def PrivateThreadPool(num_threads, **_):  # noqa: N802
    """Of tf.data: how many threads a data set has."""
    return num_threads


def override_threadpool(dataset, num_threads):
    """Of tf.data: gives a data set threads of its own."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = num_threads
    return dataset.with_options(options)


def all_sum(tensors):
    """tf.contrib.nccl's: sums on each device; on the CPU one sum for all."""
    if tf.config.list_physical_devices("GPU"):
        return nccl_ops.all_sum(tensors)
    return [tf.add_n(tensors)] * len(tensors)


class HParams:
    """tf.contrib.training's: named values, which a text may change."""

    def __init__(self, **values):
        vars(self).update(values)

    def values(self) -> dict:
        return dict(vars(self))

    def add_hparam(self, name, value):
        if name in vars(self):
            raise ValueError(f"Hyperparameter name is reserved: {name}")
        setattr(self, name, value)

    def set_hparam(self, name, value):
        if name not in vars(self):
            raise KeyError(name)
        kind = type(getattr(self, name))
        setattr(self, name, kind(value) if kind in (int, float, str) else value)

    def get(self, key, default=None):
        return vars(self).get(key, default)

    def override_from_dict(self, values):
        for name, value in values.items():
            self.set_hparam(name, value)
        return self

    def parse(self, text):
        """Reads "name=value,name=[1,2]"."""
        call = ast.parse(f"f({text})", mode="eval").body if text else types.SimpleNamespace(keywords=[])
        for given in call.keywords:
            is_word = isinstance(given.value, ast.Name) and given.value.id not in ("true", "false")
            value = given.value.id if is_word else json.loads(ast.unparse(given.value).replace("'", '"').lower())
            self.set_hparam(given.arg, value)
        return self

    def to_json(self, **kwargs) -> str:
        return json.dumps(vars(self), **kwargs)

    def __contains__(self, name):
        return name in vars(self)


class Experiment:
    """tf.contrib.learn's: an Estimator with its data, to train and to evaluate in turns."""

    def __init__(self, estimator, train_input_fn, eval_input_fn, eval_metrics=None, train_steps=None, eval_steps=100,
                 train_monitors=None, eval_hooks=None, **_):  # fmt: skip
        self.estimator, self._train = estimator, (train_input_fn, train_steps, train_monitors)
        self._evaluation = eval_input_fn, eval_steps, eval_hooks

    def train(self):
        input_fn, steps, hooks = self._train
        return self.estimator.train(input_fn, hooks, max_steps=steps)

    def evaluate(self):
        return self.estimator.evaluate(*self._evaluation)

    def train_and_evaluate(self):
        train_input_fn, steps, hooks = self._train
        eval_input_fn, eval_steps, eval_hooks = self._evaluation
        return workers.train_and_evaluate(
            self.estimator, library.api.TrainSpec(train_input_fn, steps, hooks),
            library.api.EvalSpec(eval_input_fn, eval_steps, hooks=eval_hooks),
        )  # fmt: skip


def run(experiment_fn, output_dir=None, schedule="train_and_evaluate", run_config=None, hparams=None):
    """tf.contrib.learn.learn_runner's."""
    if run_config is None:
        return getattr(experiment_fn(output_dir), schedule)()
    return getattr(experiment_fn(run_config, hparams or HParams()), schedule)()


class _DecoupledWeightDecay:
    """Multiplies variables by 1 - weight_decay before each update, as tf.contrib.opt's optimizers did."""

    def __init__(self, weight_decay, *args, **kwargs):
        self._weight_decay = weight_decay
        super().__init__(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, decay_var_list=None):
        pairs = list(grads_and_vars)
        decayed = decay_var_list or [variable for grad, variable in pairs if grad is not None]
        decay = [v1.assign_sub(variable, self._weight_decay * variable) for variable in decayed]
        with tf.control_dependencies(decay):
            return super().apply_gradients(pairs, global_step, name)


class AdamWOptimizer(_DecoupledWeightDecay, v1.train.AdamOptimizer):
    """tf.contrib.opt's."""


class MomentumWOptimizer(_DecoupledWeightDecay, v1.train.MomentumOptimizer):
    """tf.contrib.opt's."""
