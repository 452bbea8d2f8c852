"""The model of multi_gpu_model for several workers that train together."""

import contextlib
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.lockstep import alike, default_step, exchange
from tower_train.fronts.lockstep.model import TowerModel
from tower_train.fronts.lockstep.workers import Workers

_WRITERS = (  # callbacks for the chief only
    keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard,
)  # fmt: skip


class WorkerModel(TowerModel):
    """A model whose batches are split over the towers of several workers, which do all alike.

    Each worker reads whole batches and computes its part. All begin with the chief's weights and optimizer: when a
    rehearsal has made them, at each `fit`, and the weights at each `evaluate`.
    """

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str, workers: Workers):
        super().__init__(template, towers, merge_device)
        self._workers, others = workers, workers.size - 1 - workers.rank
        self._all_towers = (*[None] * len(towers) * workers.rank, *towers, *[None] * len(towers) * others)
        workers.gather("multi_gpu_model", **{"the number of towers": len(towers), "the model": alike.model(template)})
        self._shuffle_alike()  # so that a dataset that is made from now on does too

    def prepare(self, step, data):
        super().prepare(step, data)
        self._synchronize()

    def _exchange(self, step, data):
        return exchange.begin(self._workers, "evaluation" if step is default_step.test else "training", data)

    def _synchronize(self) -> None:
        """Gives the variables of the model and of its optimizers the chief's values."""
        with compat.eager_mode():
            variables = [*self.template.variables, *(v for each, _ in self._trained or () for v in each.variables)]
            self._workers.gather("variables", **{"what there is": alike.variables(variables)})
            values = self._workers.broadcast([np.asarray(variable.value) for variable in variables])
            if not self._workers.is_chief:
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)

    def _shuffle_alike(self) -> None:
        """Gives all workers the chief's random states, by which Keras shuffles; draws a seed if there is none."""
        seed = compat.random_seed()
        drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        name, key, *others = np.random.get_state()
        text = json.dumps({"seed": drawn, "python": random.getstate(), "numpy": [name, key.tolist(), *others]})
        sent = np.frombuffer(text.encode() if self._workers.is_chief else b"", np.uint8)
        [[chiefs], *_] = self._workers.gather("shuffling", [sent])
        states = json.loads(chiefs.tobytes())
        if seed != states["seed"]:
            tf.random.set_seed(states["seed"])
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(states["numpy"]))

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Within this block an exchange's own error is raised in place of what TensorFlow makes of it."""
        self.begin_batches()
        try:
            yield
        except (tf.errors.OpError, RuntimeError):  # the latter from a step that runs eagerly
            if self._workers.failure:
                raise self._workers.failure from None
            raise

    def _local_arguments(self, arguments: dict) -> dict:
        """Returns the arguments of a call for this worker: only the chief's callbacks write and show the progress."""
        callbacks = arguments.get("callbacks") or []
        callbacks = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        callbacks, quiet = keras.tree.flatten(callbacks), {}
        if not self._workers.is_chief:
            callbacks, quiet = [each for each in callbacks if not isinstance(each, _WRITERS)], {"verbose": 0}
        return arguments | quiet | {"callbacks": [*callbacks, _Begin(self)]}

    def begin_training(self) -> None:
        """Gives all workers the chief's weights, optimizer and first epoch, which it may just have restored."""
        self._synchronize()
        [[first], *_] = self._workers.gather("the first epoch", [np.array(compat.first_epoch(self) or 0)])
        compat.set_first_epoch(self, int(first) or None)

    def begin_batches(self, epoch: int | None = None) -> None:
        """Notes that the batches of an epoch, or of an evaluation, begin."""
        self._workers.begin_batches("" if epoch is None else f" in epoch {epoch + 1}")

    def fit(self, *args, **kwargs):
        """Trains as keras.Model.fit, all workers together; batch_size is the global batch.

        Raises:
          ConfigError: workers that differ.
          WorkerError: a worker is missing.
        """
        arguments = _bound(keras.Model.fit, self, args, kwargs)
        with self._together():
            self._workers.gather("fit", **alike.call(arguments), **alike.optimizer(self.optimizer))
            self._shuffle_alike()
            return super().fit(**self._local_arguments(arguments))

    def evaluate(self, *args, **kwargs):
        """Evaluates as keras.Model.evaluate, all workers together; raises as fit."""
        arguments = _bound(keras.Model.evaluate, self, args, kwargs)
        if isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):  # of fit
            return super().evaluate(*args, **kwargs)
        with self._together():
            self._workers.gather("evaluate", **alike.call(arguments))
            self._synchronize()
            return super().evaluate(**self._local_arguments(arguments))

    def train_on_batch(self, *args, **kwargs):
        """Trains as keras.Model.train_on_batch does, all workers together on the global batch; raises as fit."""
        with self._together():
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """Evaluates as keras.Model.test_on_batch does, all workers together on the global batch; raises as fit."""
        with self._together():
            return super().test_on_batch(*args, **kwargs)

    def predict(self, *args, **kwargs):
        """Predicts as keras.Model.predict, each worker by itself."""
        arguments = _bound(keras.Model.predict, self, args, kwargs)
        return super().predict(**(arguments if self._workers.is_chief else arguments | {"verbose": 0}))

    def save(self, *args, **kwargs):
        """Saves the template, in the chief."""
        return super().save(*args, **kwargs) if self._workers.is_chief else None

    def save_weights(self, *args, **kwargs):
        """Saves the template's weights, in the chief."""
        return super().save_weights(*args, **kwargs) if self._workers.is_chief else None


class _Begin(keras.callbacks.Callback):
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


def _bound(method: Callable, model: keras.Model, args: tuple, kwargs: dict) -> dict:
    """Returns the arguments of a call of one of Keras' methods, by name."""
    arguments = inspect.signature(method).bind(model, *args, **kwargs).arguments
    del arguments["self"]
    return arguments | arguments.pop("kwargs", {})
