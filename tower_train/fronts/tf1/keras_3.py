"""Names of Keras 2 that Keras 3 refuses: of arguments, methods and metrics, in a program of Keras."""

import functools

import keras

_WITHOUT_MEANING = ("workers", "use_multiprocessing", "max_queue_size", "max_q_size")


def _renamed(function, **old_names: str):
    """Returns a function that takes arguments by their old names too; an argument whose new name is "" is left out."""

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        kwargs = {old_names.get(name, name): value for name, value in kwargs.items() if old_names.get(name, name)}
        return function(*args, **kwargs)

    return call


def _optimizer(cls: type):
    @functools.wraps(cls, updated=())
    def make(*args, decay=0.0, **kwargs):
        if kwargs.get("epsilon", 0) is None:  # Keras 2: its default
            del kwargs["epsilon"]
        optimizer = _renamed(cls, lr="learning_rate")(*args, **kwargs)
        if decay:  # Keras 2: rate / (1 + decay * step)
            rate = float(optimizer.learning_rate)
            optimizer.learning_rate = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
        return optimizer

    return make


for _name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"):
    globals()[_name] = _optimizer(getattr(keras.optimizers, _name))
ReduceLROnPlateau = _renamed(keras.callbacks.ReduceLROnPlateau, epsilon="min_delta")
ModelCheckpoint = _renamed(keras.callbacks.ModelCheckpoint, period="")


def prepare(is_named_acc: bool) -> None:
    """Gives Keras' models the methods and arguments of Keras 2.

    is_named_acc: whether the program calls the metric "accuracy" acc in logs, as Keras did before 2.3.
    """
    model, compile_as_is = keras.Model, keras.Model.compile
    for name in ("fit", "evaluate", "predict"):
        for alias in (name, f"{name}_generator"):
            setattr(model, alias, _renamed(getattr(model, name), **dict.fromkeys(_WITHOUT_MEANING, "")))

    def compile_(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_as_is(self, *args, metrics=renamed, **kwargs)

    if is_named_acc:
        model.compile = compile_
