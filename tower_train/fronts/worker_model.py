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

from tower_train import errors
from tower_train.fronts import alike, compat, growth, joined
from tower_train.fronts.own_steps import exchange, parts
from tower_train.fronts.own_steps.step_model import StepModel
from tower_train.fronts.parallel_model import ParallelModel
from tower_train.fronts.workers import Workers
from tower_train.graph import gradients
from tower_train.graph.devices import HOST

_TRAINING, _EVALUATION = "training", "evaluation"
_WRITERS = (  # callbacks for the chief only
    keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard,
)  # fmt: skip


class _Together(ParallelModel):
    """A model whose batches are split over the towers of several workers, which do all alike.

    Each worker reads whole batches and computes its part.
    """

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str, workers: Workers):
        super().__init__(template, towers, merge_device)
        self._workers, others = workers, workers.size - 1 - workers.rank
        self._all_towers = (*[None] * len(towers) * workers.rank, *towers, *[None] * len(towers) * others)
        self._is_synchronized = False
        workers.gather("multi_gpu_model", **{"the number of towers": len(towers), "the model": alike.model(template)})
        if template.built:
            self._synchronize(template.variables)
        self._shuffle_alike()  # so that a dataset that is made from now on does too

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self._is_synchronized = False

    def _average(self, tower_grads):
        return joined.average(self._workers, gradients.average_gradients(tower_grads))

    def _trained(self) -> list[keras.Variable]:
        """The variables of the model and of its optimizers."""
        if not self.optimizer.built:
            self.optimizer.build(self.template.trainable_variables)
        return [*self.template.variables, *self.optimizer.variables]

    def _synchronize(self, variables: list[keras.Variable]) -> None:
        """Gives variables the chief's values."""
        self._workers.gather("variables", **{"what there is": alike.variables(variables)})
        values = self._workers.broadcast([np.asarray(variable.value) for variable in variables])
        if not self._workers.is_chief:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

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
        return given | quiet | {"callbacks": [*callbacks, _Begin(self)]}

    def begin_training(self) -> None:
        """Gives all workers the chief's weights, optimizer and first epoch, which it may just have restored."""
        self._synchronize(self._trained())
        self._is_synchronized = True
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
            self._workers.gather("fit", **alike.call(given), **alike.optimizer(self.optimizer))
            self._shuffle_alike()
            return super().fit(**self._own(given))

    def evaluate(self, *args, **kwargs):
        """Evaluates as keras.Model.evaluate, all workers together; raises as fit."""
        given = _bound(keras.Model.evaluate, self, args, kwargs)
        if isinstance(given.get("callbacks"), keras.callbacks.CallbackList):  # of fit
            return super().evaluate(*args, **kwargs)
        self._build(given.get("x"))
        with self._together():
            self._workers.gather("evaluate", **alike.call(given))
            self._synchronize(self.template.variables)
            return super().evaluate(**self._own(given))

    def train_on_batch(self, *args, **kwargs):
        """Trains as keras.Model.train_on_batch does, all workers together on the global batch.

        Raises:
          ConfigError, WorkerError: as for fit.
        """
        with self._on_batch(keras.Model.train_on_batch, args, kwargs):
            return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """Evaluates as keras.Model.test_on_batch does, all workers together on the global batch.

        Raises:
          ConfigError, WorkerError: as for fit.
        """
        with self._on_batch(keras.Model.test_on_batch, args, kwargs):
            return super().test_on_batch(*args, **kwargs)

    @contextlib.contextmanager
    def _on_batch(self, method: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
        """Around a call for one batch; the first one after `compile` begins with the chief's weights and optimizer."""
        self._build(_bound(method, self, args, kwargs).get("x"))
        with self._together():
            if not self._is_synchronized:
                self._workers.gather(method.__name__, **alike.optimizer(self.optimizer))
                self._synchronize(self._trained())
                self._is_synchronized = True
            yield

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


class WorkerModel(_Together):
    """A ParallelModel among several workers."""

    def _join_workers(self, towers, y, sample_weight, training):
        kind = _TRAINING if training else _EVALUATION
        towers, (y, sample_weight) = joined.join(self._workers, kind, towers, (y, sample_weight))
        return towers, y, sample_weight


class WorkerStepModel(WorkerModel, StepModel):
    """A StepModel among several workers, each of which evaluates whole batches by a test_step of the template's own."""

    def _build(self, x) -> None:
        """Leaves to the first step to make weights that a step of the template's own uses."""

    def _trained(self):
        own = [v for optimizer, _ in self._progress.trained or () for v in optimizer.variables]
        return [*self.template.variables, *own]

    def _begin_steps(self):
        self._synchronize(self._trained())

    def _exchange(self, data):
        joined.begin(self._workers, _TRAINING, parts.batch_size(data))
        return exchange.between(self._workers)


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
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    del given["self"]
    return given | given.pop("kwargs", {})
