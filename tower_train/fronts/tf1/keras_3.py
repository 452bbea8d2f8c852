"""Names of Keras 2 that Keras 3 refuses: of arguments, methods and metrics, in a program of Keras."""

import functools

import keras

_WITHOUT_MEANING = ("workers", "use_multiprocessing", "max_queue_size", "max_q_size")


def _renamed(cls: type, **old_names: str):
    """Returns a function that makes an object of a class from arguments with their old names."""

    @functools.wraps(cls, updated=())
    def make(*args, **kwargs):
        for old, new in old_names.items():
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
        return cls(*args, **{name: value for name, value in kwargs.items() if name})

    return make


def _optimizer(name: str):
    make = _renamed(getattr(keras.optimizers, name), lr="learning_rate")

    @functools.wraps(make)
    def with_decay(*args, decay=0.0, **kwargs):
        if kwargs.get("epsilon", 0) is None:
            del kwargs["epsilon"]
        optimizer = make(*args, **kwargs)
        if decay:  # Keras 2: rate / (1 + decay * step)
            rate = float(optimizer.learning_rate)
            optimizer.learning_rate = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
        return optimizer

    return with_decay


SGD, RMSprop, Adagrad, Adadelta, Adam, Adamax, Nadam = map(
    _optimizer, ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam")
)
ReduceLROnPlateau = _renamed(keras.callbacks.ReduceLROnPlateau, epsilon="min_delta")
EarlyStopping = _renamed(keras.callbacks.EarlyStopping)
ModelCheckpoint = _renamed(keras.callbacks.ModelCheckpoint, period="")


def prepare(is_named_acc: bool) -> None:
    """Gives Keras' models the methods and arguments of Keras 2.

    is_named_acc: whether the program calls the metric "accuracy" acc in logs, as Keras did before 2.3.
    """

    def without(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            return method(*args, **{name: value for name, value in kwargs.items() if name not in _WITHOUT_MEANING})

        return call

    def compile_(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_as_is(self, *args, metrics=renamed, **kwargs)

    model, compile_as_is = keras.Model, keras.Model.compile
    for name in ("fit", "evaluate", "predict"):
        setattr(model, name, without(getattr(model, name)))
        setattr(
            model, f"{name}_generator", lambda self, *args, name=name, **kwargs: getattr(self, name)(*args, **kwargs)
        )
    if is_named_acc:
        model.compile = compile_
