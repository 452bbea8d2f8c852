"""Runs published programs of keras.io as they are, by Keras on one device and in towers, and compares their weights.

    python tests/fronts/published.py FILE...
    scripts/local_cluster --workers=2 -- python tests/fronts/published.py FILE...  # each worker is a tower

In float64 on made-up data, up to the second `fit`, at most two epochs each. The files are those of docs/migration.md's
table. On both sides `keras_core` is keras; `tf.random` draws as keras.random does; batch normalisation, which sees a
tower's part of a batch, is layer normalisation; `prepare` mends what fails in Keras itself. SimCLR's contrastive loss
gets the rows of all towers, one line (`joins`).
"""

import contextlib
import functools
import io
import os
import pathlib
import sys
import tempfile
import types
import zipfile

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

import tower_train
import tower_train.steps

EXAMPLES, BATCH, EPOCHS, FITS = 60, 25, 2, 2
PAIRS_FROM = 30_000  # siamese_contrastive.py validates on the examples from here on
rng = np.random.default_rng(0)


class Enough(Exception):
    """The program has trained as often as is compared."""


def images(*shape, count=EXAMPLES):
    return rng.integers(0, 256, [count, *shape], np.uint8)


def labelled(*shape, count=EXAMPLES, columns=()):
    """Returns data for training and for tests as `keras.datasets` does."""
    return tuple((images(*shape, count=n), rng.integers(0, 10, [n, *columns])) for n in (count, EXAMPLES))


def reviews(num_words):
    return tuple((rng.integers(1, num_words, [EXAMPLES, 20]).tolist(), rng.integers(0, 2, EXAMPLES)) for _ in "ab")


def series(path, **_):
    labels = rng.choice([-1, 1], [EXAMPLES, 1])
    return np.concatenate([labels, np.sin(np.arange(100) / (9 + labels)) + rng.normal(size=[EXAMPLES, 100])], axis=1)


def faces(url, path, **_):
    with zipfile.ZipFile(path, "w") as archive:
        for i, pixels in enumerate(images(80, 80, 3)):
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "png")
            archive.writestr(f"{i}.png", encoded.getvalue())


def objects(*_, **__):
    """Returns as many examples for each use, so that towers draw by example for a batch of labelled and others."""
    return tf.data.Dataset.from_tensor_slices((images(96, 96, 3, count=BATCH), rng.integers(0, 10, BATCH)))


def in_float64(function):
    """Returns it with the default dtype float64, which is its second argument or a named one."""
    return lambda shape, *args, **kwargs: function(shape, *args, **({} if args else {"dtype": tf.float64}) | kwargs)


def prepare():
    """Puts made-up data, one source of random numbers and float64 where the programs ask for others."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.ops.backend = keras.ops  # as it was in keras_core

    class AnyPath(keras.callbacks.ModelCheckpoint):  # as it took then; in a folder of the process's own
        def __init__(self, path, **kwargs):
            super().__init__(f"{os.path.basename(path)}.weights.h5", **kwargs)

    keras.callbacks.ModelCheckpoint = AnyPath
    in_top_k = tf.math.in_top_k
    tf.math.in_top_k = lambda targets, outputs, k: in_top_k(targets, tf.cast(outputs, tf.float32), k)
    read = keras.utils.image_dataset_from_directory
    keras.utils.image_dataset_from_directory = lambda *args, **kwargs: read(*args, **kwargs).map(
        lambda pixels: tf.cast(pixels, tf.float64)
    )
    tf.keras, keras.layers.BatchNormalization = keras, keras.layers.LayerNormalization
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"}
    sys.modules.update({f"keras_core{name[5:]}": module for name, module in modules.items()})
    stubs = {"gdown": {"download": faces}, "tensorflow_datasets": {"load": objects}}
    for name, contents in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)
    keras.datasets.fashion_mnist.load_data = functools.partial(labelled, 28, 28)
    keras.datasets.cifar100.load_data = functools.partial(labelled, 32, 32, 3, columns=[1])
    keras.datasets.imdb.load_data, np.loadtxt = reviews, series
    seed = keras.random.SeedGenerator(3)
    for name in ("normal", "uniform"):
        setattr(tf.random, name, functools.partial(getattr(keras.random, name), seed=seed))
    for name in ("ones", "zeros", "eye"):
        setattr(tf, name, in_float64(getattr(tf, name)))
    return seed


def joins(cls):
    if cls.__name__ == "ContrastiveModel" and not hasattr(cls, "joined"):
        cls.joined, compare = True, cls.contrastive_loss
        cls.contrastive_loss = lambda self, *views: compare(self, *tower_train.steps.join(views))


def runs(path, seed, gpus):
    """Returns (batches, weights) of each `fit` of a program, all of whose models train in so many towers."""
    global rng
    rng, done, fit = np.random.default_rng(0), [], keras.Model.fit
    source = path.read_text()
    keras.utils.set_random_seed(1)

    def fitted(model, *args, epochs=1, callbacks=(), **kwargs):
        keras.Model.fit, batches = fit, []
        seed.state.assign([0, 3])
        keras.utils.set_random_seed(2)
        joins(type(model))
        trained = tower_train.multi_gpu_model(model, gpus=gpus) if gpus else model
        noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
        args, kwargs = keras.tree.map_structure(
            lambda leaf: leaf[:EXAMPLES] if isinstance(leaf, np.ndarray) else leaf, (args, kwargs)
        )
        settings = {"epochs": min(epochs, EPOCHS), "verbose": 0, "callbacks": [*callbacks, noting]}
        if "batch_size" in kwargs:
            settings["batch_size"] = BATCH
        history = trained.fit(*args, **kwargs | settings)
        done.append((len(batches), model.get_weights()))
        keras.Model.fit = fitted
        if len(done) == min(FITS, source.count(".fit(")):
            raise Enough
        return history

    keras.Model.fit = fitted
    count = EXAMPLES + (PAIRS_FROM if "siamese" in path.name else 0)
    keras.datasets.mnist.load_data = functools.partial(labelled, 28, 28, count=count)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.chdir(folder), contextlib.suppress(Enough):
            exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    keras.Model.fit = fit
    return done


def main(*paths):
    os.environ["MPLBACKEND"] = "agg"
    workers = tower_train.cluster.init().size
    seed = prepare()
    for path in (pathlib.Path(path).absolute() for path in paths):
        alone, parallel = runs(path, seed, 0), runs(path, seed, 1 if workers > 1 else 2)
        pairs = [pair for (_, a), (_, b) in zip(alone, parallel, strict=True) for pair in zip(a, b, strict=True)]
        batches = sum(count for count, _ in parallel)
        print(f"{path.stem}: {batches} steps, {max(np.abs(a - b).max() for a, b in pairs):.0e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
