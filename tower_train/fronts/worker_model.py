"""The model of multi_gpu_model for several workers that train together."""

import contextlib
import inspect
import json
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, growth, joined
from tower_train.fronts.parallel_model import ParallelModel
from tower_train.fronts.workers import Workers
from tower_train.graph import gradients
from tower_train.graph.devices import HOST

_TRAINING, _EVALUATION = "training", "evaluation"
_WRITERS = (  # callbacks for the chief only
    keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard,
)  # fmt: skip


class WorkerModel(ParallelModel):
    """A ParallelModel whose batches are split over the towers of several workers.

    Each worker reads whole batches and computes the outputs and gradients of its part.
    """

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str, workers: Workers):
        super().__init__(template, towers, merge_device)
        self._workers, others = workers, workers.size - 1 - workers.rank
        self._all_towers = (*[None] * len(towers) * workers.rank, *towers, *[None] * len(towers) * others)
        facts = {"the number of towers": len(towers), "the model": _about(template)}
        workers.gather("multi_gpu_model", **facts)
        if template.built:
            self._synchronize(template.variables)

    def _join_workers(self, towers, y, sample_weight, training):
        kind = _TRAINING if training else _EVALUATION
        towers, (y, sample_weight) = joined.join(self._workers, kind, towers, (y, sample_weight))
        return towers, y, sample_weight

    def _average(self, tower_grads):
        return joined.average(self._workers, gradients.average_gradients(tower_grads))

    def _synchronize(self, variables: list[keras.Variable]) -> None:
        """Gives variables the chief's values."""
        self._workers.gather("variables", **{"what there is": _about_variables(variables)})
        values = self._workers.broadcast([np.asarray(variable.value) for variable in variables])
        if not self._workers.is_chief:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Raises an exchange's own error within this block, instead of TensorFlow's error about it."""
        self._workers.begin_batches()
        try:
            yield
        except tf.errors.OpError:
            if self._workers.failure:
                raise self._workers.failure from None
            raise

    def _build(self, x) -> None:
        """Makes missing weights, so that all workers can begin with the chief's."""
        if self.template.built:
            return
        leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
        if isinstance(x, tf.data.Dataset):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(x)))
        elif not all(hasattr(leaf, "shape") for leaf in leaves):
            raise errors.ConfigError(
                f"{self.template.name} has no weights yet, and the workers must begin with the same. Call it on a "
                "batch of inputs before fit."
            )
        with tf.device(HOST):
            self.template(growth.rows(x, slice(0, 1)))

    def _shuffle_alike(self) -> None:
        """Gives all workers the chief's random states, by which Keras shuffles; draws a seed if there is none."""
        seed = compat.random_seed()
        drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        name, key, *others = np.random.get_state()
        text = json.dumps({"seed": drawn, "python": random.getstate(), "numpy": [name, key.tolist(), *others]})
        own = np.frombuffer(text.encode() if self._workers.is_chief else b"", np.uint8)
        [[chiefs], *_] = self._workers.gather("shuffling", [own])
        states = json.loads(chiefs.tobytes())
        if seed != states["seed"]:
            tf.random.set_seed(states["seed"])
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(states["numpy"]))

    def _own(self, given: dict) -> dict:
        """Returns the arguments of a call for this worker: only the chief's callbacks write and show the progress."""
        callbacks = given.get("callbacks") or []
        callbacks = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        callbacks, quiet = keras.tree.flatten(callbacks), {}
        if not self._workers.is_chief:
            callbacks, quiet = [each for each in callbacks if not isinstance(each, _WRITERS)], {"verbose": 0}
        return given | quiet | {"callbacks": [*callbacks, _Together(self)]}

    def begin_training(self) -> None:
        """Gives all workers the chief's weights, optimizer and first epoch, which it may just have restored."""
        if not self.optimizer.built:
            self.optimizer.build(self.template.trainable_variables)
        self._synchronize([*self.template.variables, *self.optimizer.variables])
        [[first], *_] = self._workers.gather("the first epoch", [np.array(compat.first_epoch(self) or 0)])
        compat.set_first_epoch(self, int(first) or None)

    def begin_batches(self, epoch: int | None = None) -> None:
        """Notes that the batches of an epoch, or of an evaluation, begin."""
        self._workers.begin_batches("" if epoch is None else f" in epoch {epoch + 1}")

    def fit(self, *args, **kwargs):
        """Trains as keras.Model.fit, all workers together; batch_size is the global batch.

        Raises:
          ConfigError: workers that differ; a model without weights whose input cannot be inspected.
          WorkerError: a worker is missing.
        """
        given = _bound(keras.Model.fit, self, args, kwargs)
        self._build(given.get("x"))
        with self._together():
            self._workers.gather("fit", **_about_call(given), **_about_optimizer(self.optimizer))
            self._shuffle_alike()
            return super().fit(**self._own(given))

    def evaluate(self, *args, **kwargs):
        """Evaluates as keras.Model.evaluate, all workers together; raises as fit."""
        given = _bound(keras.Model.evaluate, self, args, kwargs)
        if isinstance(given.get("callbacks"), keras.callbacks.CallbackList):  # of fit
            return super().evaluate(*args, **kwargs)
        self._build(given.get("x"))
        with self._together():
            self._workers.gather("evaluate", **_about_call(given))
            self._synchronize(self.template.variables)
            return super().evaluate(**self._own(given))

    def predict(self, *args, **kwargs):
        """Predicts as keras.Model.predict, each worker by itself."""
        given = _bound(keras.Model.predict, self, args, kwargs)
        return super().predict(**(given if self._workers.is_chief else given | {"verbose": 0}))

    def save(self, *args, **kwargs):
        """Saves the template, in the chief."""
        return super().save(*args, **kwargs) if self._workers.is_chief else None

    def save_weights(self, *args, **kwargs):
        """Saves the template's weights, in the chief."""
        return super().save_weights(*args, **kwargs) if self._workers.is_chief else None


class _Together(keras.callbacks.Callback):
    """The last callback: keeps the workers together."""

    async_safe = True

    def __init__(self, model: WorkerModel):
        super().__init__()
        self._of = model

    def on_train_begin(self, logs=None):
        self._of.begin_training()

    def on_epoch_begin(self, epoch, logs=None):
        self._of.begin_batches(epoch)

    def on_test_begin(self, logs=None):
        self._of.begin_batches()


def _bound(method: Callable, *args_and_kwargs) -> dict:
    """Returns the arguments of a call of one of Keras' methods, by name."""
    model, args, kwargs = args_and_kwargs
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    del given["self"]
    return given | given.pop("kwargs", {})


def _about_call(given: dict) -> dict:
    """Returns by name what must be the same in all workers of a call of fit or evaluate."""
    return {
        name: _about_data(value) if name in ("x", "y", "sample_weight", "validation_data") else _text(value)
        for name, value in given.items()
        if name not in ("verbose", "callbacks") and value is not None
    }


def _about_data(data) -> str:
    if isinstance(data, tf.data.Dataset):
        return f"a data set of {int(data.cardinality())} batches"
    if isinstance(data, keras.utils.PyDataset):
        return f"a PyDataset of {data.num_batches} batches"
    sizes = [leaf.shape[0] for leaf in keras.tree.flatten(data) if getattr(leaf, "shape", None)]
    return f"{sizes[0]} examples" if sizes else type(data).__name__


def _about_optimizer(optimizer) -> dict:
    return {f"the optimizer's {name}": _text(value) for name, value in optimizer.get_config().items() if name != "name"}


def _about(model: keras.Model) -> str:
    """Describes a model: its size, and a number that identifies it."""
    layers = [(type(layer).__name__, _config(layer)) for layer in compat.sublayers(model)]
    return f"{_about_variables(model.variables)} in {len(layers)} layers ({_checksum(layers)})"


def _about_variables(variables: list[keras.Variable]) -> str:
    shapes = [(tuple(variable.shape), variable.dtype, variable.trainable) for variable in variables]
    count = sum(int(np.prod(shape)) for shape, *_ in shapes)
    return f"{len(shapes)} variables of {count} numbers ({_checksum(shapes)})"


def _config(layer: keras.Layer) -> dict:
    try:
        return {name: value for name, value in layer.get_config().items() if name not in ("name", "layers")}
    except (NotImplementedError, TypeError, ValueError):  # a user's own layer may have none
        return {}


def _checksum(value) -> str:
    return f"{zlib.crc32(_text(value).encode()):08x}"


def _text(value) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
