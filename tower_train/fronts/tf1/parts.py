"""Parts of tf.contrib that no package of today has, in short."""

import functools
import json
import re
import types

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library, workers

v1 = tf.compat.v1
VERSION = "1.15.5"  # programs compare it
_DEFAULT_UID_WHITE_LIST = []  # of tf.contrib.learn.RunConfig
LSTMBlockCell = v1.nn.rnn_cell.BasicLSTMCell  # the same arithmetic; its variables have other names


class Strategy:
    """tf.contrib.distribute's: how many towers train an Estimator, by RunConfig(train_distribute=...)."""

    def __init__(self, devices=None, num_gpus=None, num_gpus_per_worker=None, **_):
        devices = [devices] if isinstance(devices, str) else list(devices or ())
        gpus = len(tf.config.list_physical_devices("GPU"))
        count = len(devices) or num_gpus or num_gpus_per_worker or gpus or 1
        self.extended = types.SimpleNamespace(
            worker_devices=tuple(devices if devices and gpus else (f"/cpu:{i}" for i in range(count)))
        )
        self.num_replicas_in_sync = self.num_towers = count

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.ConfigError(
            f"A strategy's {name} is not there: it says how many towers train an Estimator, by "
            "RunConfig(train_distribute=...). For Keras' fit use keras.utils.multi_gpu_model(model, gpus=N)."
        )


MirroredStrategy = OneDeviceStrategy = CollectiveAllReduceStrategy = ParameterServerStrategy = Strategy


def index_table_from_tensor(mapping, *args, **kwargs):
    """tf.contrib.lookup's."""
    return compat.index_table_from_tensor(mapping, *args, **kwargs)


def sequence_loss(logits, targets, weights, average_across_timesteps=True, average_across_batch=True, name=None):
    """tf.contrib.seq2seq's: the weighted cross-entropy of [batch, time, classes] logits."""
    with v1.name_scope(name, "sequence_loss"):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits) * weights
        axes = [axis for axis, averaged in enumerate((average_across_batch, average_across_timesteps)) if averaged]
        return tf.reduce_sum(losses, axes) / (tf.reduce_sum(weights, axes) + 1e-12) if axes else losses


def OptimizeGraph(config, metagraph, *args, **kwargs):  # noqa: N802
    """Grappler's, which took the RewriterConfig alone."""
    if isinstance(config, type(v1.GraphOptions().rewrite_options)):
        config.meta_optimizer_iterations = config.ONE  # a second pass over its own result fails
        config = v1.ConfigProto(graph_options=v1.GraphOptions(rewrite_options=config))
    return compat.optimize_graph(config, metagraph, *args, **kwargs)


class _Linear:
    """The product of joined arguments that cells of tf.contrib.rnn made."""

    def __init__(self, args, output_size, build_bias, bias_initializer=None, kernel_initializer=None):
        shape, dtype = self._joined(args).shape, self._joined(args).dtype
        self._kernel = v1.get_variable("kernel", [shape[1], output_size], dtype, kernel_initializer)
        begin = bias_initializer or v1.zeros_initializer()
        self._bias = v1.get_variable("bias", [output_size], dtype, begin) if build_bias else 0

    def __call__(self, args):
        return tf.matmul(self._joined(args), self._kernel) + self._bias

    @staticmethod
    def _joined(args):
        return tf.concat(args, 1) if isinstance(args, list | tuple) else args


def _linear(args, output_size, bias, bias_initializer=None, kernel_initializer=None):
    return _Linear(args, output_size, bias, bias_initializer, kernel_initializer)(args)


class HParams(types.SimpleNamespace):
    """tf.contrib.training's: named values, which a text may change."""

    def values(self) -> dict:
        return dict(vars(self))

    def get(self, key, default=None):
        return vars(self).get(key, default)

    def add_hparam(self, name, value):
        setattr(self, name, value)

    def set_hparam(self, name, value):
        vars(self)[name]  # KeyError for one that is not there
        setattr(self, name, value)

    def override_from_dict(self, values):
        vars(self).update(values)
        return self

    def parse(self, text):
        """Reads "name=value,name=[1,2]"."""
        for name, value in re.findall(r"(\w+)=(\[.*?\]|[^,]*)", text):
            self.set_hparam(name, value if isinstance(getattr(self, name), str) else json.loads(value.lower()))
        return self


def Experiment(  # noqa: N802
    estimator, train_input_fn, eval_input_fn, eval_metrics=None, train_steps=None, eval_steps=100,
    train_monitors=None, eval_hooks=None, **_,
):  # fmt: skip
    """tf.contrib.learn's: an Estimator with its data, to train and to evaluate in turns."""
    specs = (
        library.api.TrainSpec(train_input_fn, train_steps, train_monitors),
        library.api.EvalSpec(eval_input_fn, eval_steps, hooks=eval_hooks),
    )
    return types.SimpleNamespace(
        estimator=estimator,
        train=functools.partial(estimator.train, train_input_fn, train_monitors, max_steps=train_steps),
        evaluate=functools.partial(estimator.evaluate, eval_input_fn, eval_steps, eval_hooks),
        train_and_evaluate=functools.partial(workers.train_and_evaluate, estimator, *specs),
    )


def run(experiment_fn, output_dir=None, schedule="train_and_evaluate", run_config=None, hparams=None):
    """tf.contrib.learn.learn_runner's."""
    return getattr(experiment_fn(output_dir) if run_config is None else experiment_fn(run_config, hparams), schedule)()


def _with_decoupled_weight_decay(base):
    """Returns tf.contrib.opt's optimizer, which multiplies variables by 1 - weight_decay before each update."""

    class Optimizer(base):
        def __init__(self, weight_decay, *args, **kwargs):
            self._weight_decay = weight_decay
            super().__init__(*args, **kwargs)

        def apply_gradients(self, grads_and_vars, global_step=None, name=None, decay_var_list=None):
            pairs = list(grads_and_vars)
            decayed = decay_var_list or [variable for grad, variable in pairs if grad is not None]
            with tf.control_dependencies([v1.assign_sub(each, self._weight_decay * each) for each in decayed]):
                return super().apply_gradients(pairs, global_step, name)

    return Optimizer


AdamWOptimizer = _with_decoupled_weight_decay(v1.train.AdamOptimizer)
MomentumWOptimizer = _with_decoupled_weight_decay(v1.train.MomentumOptimizer)
