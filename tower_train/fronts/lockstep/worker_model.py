"""The model of multi_gpu_model for several workers that train together."""

import functools
import inspect
import os
import re
import zlib
from collections.abc import Callable

import keras
import numpy as np

from tower_train.fronts import compat
from tower_train.fronts.lockstep import default_step, exchange
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
        self.workers, others = workers, workers.size - 1 - workers.rank
        self._all_towers = (*[None] * len(towers) * workers.rank, *towers, *[None] * len(towers) * others)
        layers = [(type(layer).__name__, _config(layer)) for layer in compat.sublayers(template)]
        described = f"{_described(template.variables)} in {len(layers)} layers ({_checksum(layers)})"
        seed = compat.random_seed()
        drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        facts = {"the number of towers": len(towers), "the model": described}
        [[chiefs], *_] = workers.gather("multi_gpu_model", [np.array(drawn)], **facts)
        if seed != chiefs:  # so that what is shuffled from now on is shuffled alike
            keras.utils.set_random_seed(int(chiefs))

    def prepare(self, step, data):
        super().prepare(step, data)
        self.synchronize()

    def _exchange(self, step, data):
        return exchange.begin(self.workers, "evaluation" if step is default_step.test else "training", data)

    def synchronize(self) -> None:
        """Gives the variables of the model and of its optimizers the chief's values."""
        with compat.eager_mode():
            variables = [*self.template.variables, *(v for each, _ in self._trained or () for v in each.variables)]
            self.workers.gather("variables", **{"what there is": _described(variables)})
            values = [variable.numpy() for variable in variables]
            sent = values if self.workers.is_chief else map(np.zeros_like, values)  # so that the sum is the chief's
            for variable, value in zip(variables, self.workers.sum(list(sent)), strict=True):
                variable.assign(value)

    def begin_training(self) -> None:
        """Gives all workers the chief's weights, optimizer and first epoch, which it may just have restored."""
        self.synchronize()
        [[first], *_] = self.workers.gather("the first epoch", [np.array(compat.first_epoch(self) or 0)])
        compat.set_first_epoch(self, int(first) or None)

    def begin_batches(self, epoch: int | None = None) -> None:
        """Notes that the batches of an epoch, or of an evaluation, begin."""
        self.workers.begin_batches("" if epoch is None else f" in epoch {epoch + 1}")

    def predict(self, *args, **kwargs):
        """Predicts as keras.Model.predict, each worker by itself."""
        arguments = _bound(keras.Model.predict, self, args, kwargs)
        return super().predict(**(arguments if self.workers.is_chief else arguments | {"verbose": 0}))

    def save(self, *args, **kwargs):
        """Saves the template, in the chief."""
        return super().save(*args, **kwargs) if self.workers.is_chief else None

    def save_weights(self, *args, **kwargs):
        """Saves the template's weights, in the chief."""
        return super().save_weights(*args, **kwargs) if self.workers.is_chief else None


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


def _together(name: str):
    """Makes a method of Keras for all workers, which compare its arguments; only the chief's callbacks write and show
    the progress.

    It raises ConfigError for workers that differ, and WorkerError if one is missing.
    """

    @functools.wraps(method := getattr(keras.Model, name))
    def together(self, *args, **kwargs):
        arguments = _bound(method, self, args, kwargs)
        callbacks = arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):  # the evaluation of a fit
            return method(self, **arguments)
        self.begin_batches()
        with self.workers.failures_named():
            if "callbacks" in inspect.signature(method).parameters:
                self.workers.gather(name, **_facts(arguments, self.optimizer if name == "fit" else None))
                callbacks, quiet = keras.tree.flatten(callbacks or []), {}
                if not self.workers.is_chief:
                    callbacks, quiet = [each for each in callbacks if not isinstance(each, _WRITERS)], {"verbose": 0}
                arguments |= quiet | {"callbacks": [*callbacks, _Begin(self)]}
            if name == "evaluate":
                self.synchronize()
            return method(self, **arguments)

    return together


for _name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
    setattr(WorkerModel, _name, _together(_name))


def _bound(method: Callable, model: keras.Model, args: tuple, kwargs: dict) -> dict:
    """Returns the arguments of a call of one of Keras' methods, by name."""
    arguments = inspect.signature(method).bind(model, *args, **kwargs).arguments
    del arguments["self"]
    return arguments | arguments.pop("kwargs", {})


def _facts(arguments: dict, optimizer) -> dict:
    """Describes by name what must be the same in each worker: the arguments of a call, and an optimizer."""
    facts = {name: value for name, value in arguments.items() if name not in ("verbose", "callbacks")}
    for name in facts.keys() & {"x", "y", "sample_weight", "validation_data"}:
        facts[name] = [getattr(leaf, "shape", type(leaf)) for leaf in keras.tree.flatten(facts[name])]
    config = optimizer.get_config() if optimizer else {}
    facts |= {f"the optimizer's {name}": value for name, value in config.items() if name != "name"}
    return {name: _text(value) for name, value in facts.items()}


def _described(variables: list[keras.Variable]) -> str:
    shapes = [(tuple(variable.shape), variable.dtype, variable.trainable) for variable in variables]
    return f"{len(shapes)} variables of {sum(int(np.prod(s)) for s, *_ in shapes)} numbers ({_checksum(shapes)})"


def _config(layer: keras.Layer) -> dict:
    try:
        return {} if isinstance(layer, keras.Model) else layer.get_config()  # a model's layers are described too
    except (NotImplementedError, TypeError, ValueError):  # of a layer of the user's own, which has none
        return {}


def _checksum(value) -> str:
    return f"{zlib.crc32(_text(value).encode()):08x}"


def _text(value) -> str:
    """Formats a value without addresses, and without names, which depend on what else a program makes."""
    return re.sub(r" at 0x[0-9a-f]+|'name': '[^']*'", "", str(value))
