"""tf.contrib.distribute's strategies: how many towers train an Estimator."""

import types

import tensorflow as tf

from tower_train import errors


class MirroredStrategy:
    """A number of towers, for RunConfig(train_distribute=...); for Keras' own `fit`, TensorFlow's strategy.

    Args:
      devices: the towers' devices; or
      num_gpus, num_gpus_per_worker: how many they are. Else all GPUs.
    """

    def __init__(self, devices=None, num_gpus=None, num_gpus_per_worker=None, **_):
        count = num_gpus or num_gpus_per_worker or len(tf.config.list_physical_devices("GPU")) or 1
        has_gpus = bool(tf.config.list_physical_devices("GPU"))
        # Without GPUs a list of them is a number of towers on the CPU.
        named = devices if devices and has_gpus else [f"/cpu:{i}" for i in range(len(devices or ()) or count)]
        self.extended = types.SimpleNamespace(worker_devices=tuple(named))
        self.num_replicas_in_sync = self.num_towers = len(named)

    def __getattr__(self, name):
        if name.startswith("__") or "extended" not in vars(self):
            raise AttributeError(name)
        raise errors.ConfigError(
            f"{type(self).__name__}.{name}: a strategy says here how many towers train an Estimator, by "
            "RunConfig(train_distribute=...). For Keras' fit use keras.utils.multi_gpu_model(model, gpus=N)."
        )


class CollectiveAllReduceStrategy(MirroredStrategy):
    """The towers of each worker of TF_CONFIG."""


class ParameterServerStrategy(MirroredStrategy):
    """The same, without parameter servers: all workers average their gradients."""


class OneDeviceStrategy(MirroredStrategy):
    """One tower."""

    def __init__(self, device="/cpu:0", **_):
        super().__init__([device])


class DistributeConfig(types.SimpleNamespace):
    """The value of a RunConfig's experimental_distribute."""

    def __init__(self, train_distribute=None, eval_distribute=None, remote_cluster=None):
        super().__init__(
            train_distribute=train_distribute, eval_distribute=eval_distribute, remote_cluster=remote_cluster
        )
