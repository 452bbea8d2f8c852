"""Workers around Keras' methods: they compare what they do, and begin with the chief's values."""

import inspect
import os
import zlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.keras_towers.exchange import Exchange

_WRITERS = (  # callbacks for the chief only
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def begin(workers: Exchange, model: keras.Model, towers: int) -> None:
    """Waits until all workers begin with a model, with equally many towers each; from then on they draw the same random
    numbers. ConfigError if the models differ."""
    if workers.size == 1:
        return
    seed = compat.random_seed()
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    facts = {"the number of towers": towers, "the model": _described(model.variables)}
    seeds = [int(each) for [each] in workers.gather("multi_gpu_model", [np.array(drawn)], **facts)]
    if len(set(seeds)) > 1:  # so that what is shuffled from now on is shuffled alike
        keras.utils.set_random_seed(seeds[0])


def can_be_sent(variable: keras.Variable | tf.Variable) -> bool:
    """Returns whether `synchronize` takes a variable: numbers of a known shape."""
    dtype = tf.as_dtype(variable.dtype)
    return (dtype.is_floating or dtype.is_integer) and tf.TensorShape(variable.shape).is_fully_defined()


def synchronize(workers: Exchange, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    """Gives variables the chief's values."""
    if workers.size == 1:
        return
    with compat.eager_mode():
        workers.gather("variables", **{"what there is": _described(variables)})
        values = [variable.numpy() for variable in variables]
        sent = values if workers.is_chief else map(np.zeros_like, values)  # so that the sum is the chief's
        for variable, value in zip(variables, workers.sum_arrays(list(sent)), strict=True):
            variable.assign(value)


def call(method: Callable, model: keras.Model, args: tuple, kwargs: dict):
    """Calls a method of keras.Model that takes data, in all workers; `predict` in each by itself.

    Only the chief's callbacks write, and show the progress. `model.exchange` is between the workers,
    `model.trained_variables` are all that it trains with.

    Raises:
      ConfigError: the workers differ.
      WorkerError: one of them is missing.
    """
    workers = model.exchange
    if workers.size == 1:
        return method(model, *args, **kwargs)
    signature = inspect.signature(method)
    arguments = signature.bind(model, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    if isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):  # the evaluation of a fit
        return method(model, **arguments)
    if "callbacks" in signature.parameters:
        callbacks = keras.tree.flatten(arguments.get("callbacks") or [])
        if not workers.is_chief:
            callbacks = [each for each in callbacks if not isinstance(each, _WRITERS)]
            arguments["verbose"] = 0
        arguments["callbacks"] = [*callbacks, _Begin()]
    if method is keras.Model.predict:
        return method(model, **arguments)
    workers.begin_batches()
    try:
        return method(model, **arguments)
    except tf.errors.OpError as error:  # TensorFlow's, of an exchange that failed
        raise workers.failure or error from None


class _Begin(keras.callbacks.Callback):
    """The last callback: keeps the workers together."""

    async_safe = True

    def on_train_begin(self, logs=None):
        """Gives all workers the chief's weights, optimizer and first epoch, which it may just have restored."""
        synchronize(self.model.exchange, self.model.trained_variables)
        first = np.array(getattr(self.model, compat.FIRST_EPOCH) or 0)
        [[first], *_] = self.model.exchange.gather("the first epoch", [first])
        setattr(self.model, compat.FIRST_EPOCH, int(first) or None)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.exchange.begin_batches(f" in epoch {epoch + 1}")

    def on_test_begin(self, logs=None):
        self.model.exchange.begin_batches()


def _described(variables: Sequence[keras.Variable | tf.Variable]) -> str:
    shapes = str([(tuple(variable.shape), variable.dtype, variable.trainable) for variable in variables])
    return f"{len(variables)} variables with the checksum {zlib.crc32(shapes.encode()):08x}"
