"""The networks of keras.applications for image workloads, with loaded weights and a new classifier on top.

Options are those of image_folder.
"""

import functools
import os
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration
from tower_train.fronts.keras_network import keras_network
from tower_train.options import Options

NAMES = tuple(
    name
    for name in sorted(dir(keras.applications))
    if name[0].isupper() and callable(getattr(keras.applications, name))
)
IMAGENET, NONE = "imagenet", "none"
_IMAGENET_DEVIATIONS = np.array([0.229, 0.224, 0.225], np.float32)  # of colours from 0 to 1
_FLATTENING = ("VGG16", "VGG19")  # their own classifiers see every pixel of the last feature map, not the mean


def network(options: Options, num_classes: int):
    """Makes the `inference` of --network with a new softmax layer named `classifier` on top.

    The layer gets the last feature map: flattened for VGG16 and VGG19 (Simonyan and Zisserman 2015, table 1), else its
    mean over pixels. With --freeze_epochs, batch normalisation is never trained.

    When it is called it raises ConfigError for images too small for the network, no such layer, missing weights or
    weights of another network.
    """
    name, freeze_epochs = options.network, options.freeze_epochs

    def build(weights: str) -> keras.Model:
        base = _base(options, weights)
        for layer in base.layers if freeze_epochs else ():  # its statistics would forget what was learnt
            layer.trainable &= not isinstance(layer, keras.layers.BatchNormalization)
        flat = keras.layers.Flatten() if name in _FLATTENING else keras.layers.GlobalAveragePooling2D()
        logits = keras.layers.Dense(num_classes, name="classifier")(flat(base.output))
        return keras.Model(base.input, logits, name=name)

    # Without training the values come from a checkpoint, and the file may be gone. Keras builds an EfficientNetB with
    # one layer more if it has the weights from ImageNet.
    needed = IMAGENET if options.weights == IMAGENET and name.startswith("EfficientNetB") else NONE
    later = {"rate_factor": options.unfreeze_rate, "from_epoch": freeze_epochs} if freeze_epochs else None
    beginning, restored = (
        keras_network(functools.partial(build, kind), lambda name: None if name.startswith("classifier/") else later)
        for kind in (options.weights, needed)
    )

    def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
        return (beginning if training else restored)(images, training)

    inference.build = restored.build
    return inference


def preprocessing(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a network's own preprocess_input: RGB images [batch, height, width, 3] of 0..255 to float32."""
    module = getattr(keras.applications, name).__module__.rpartition(".")[2]  # "mobilenet", of MobileNet
    preprocess = getattr(keras.applications, module).preprocess_input
    return lambda images: preprocess(tf.cast(images, tf.float32), data_format="channels_last")


def notice(options: Options) -> str | None:
    """Returns a remark for the user about the weights, or None."""
    if options.weights != NONE:
        return None
    frozen = f" The layers up to {options.freeze_until} stay as random as they are." if options.freeze_until else ""
    return (
        f"This is no transfer learning: {options.network} begins with random weights (--weights={NONE}).{frozen} Give "
        f"a file of trained weights, or --weights={IMAGENET} where there is a network."
    )


def _base(options: Options, weights: str) -> keras.Model:
    """Makes the network without its top, with these weights; to be called by build_isolated."""
    name, freeze_until, shape = options.network, options.freeze_until, (options.image_size, options.image_size, 3)
    make = getattr(keras.applications, name)
    try:
        base = make(include_top=False, weights=None, input_shape=shape)
    except ValueError as error:
        raise errors.ConfigError(f"--network={name} and --image_size={shape[0]}: {errors.reason(error)}.") from None
    if weights == IMAGENET:
        try:
            base = make(include_top=False, weights=IMAGENET, input_shape=shape)
        except Exception as error:  # Keras raises a bare Exception if the download fails
            raise errors.ConfigError(
                f"--weights={IMAGENET}: those of {name} cannot be fetched ({errors.reason(error)}). Fetch them where "
                f"there is a network and give the file by --weights=FILE, or go without: --weights={NONE}."
            ) from None
    elif weights != NONE:
        _load(base, name, os.path.expanduser(weights))
    if freeze_until:
        names = [layer.name for layer in base.layers]
        if freeze_until not in names:
            raise errors.ConfigError(
                f"--freeze_until={freeze_until}: {name} has no layer of that name, but {enumeration(names[::-1], 20)}."
            )
        for layer in base.layers[: names.index(freeze_until) + 1]:
            layer.trainable = False
    return base


def _load(base: keras.Model, name: str, path: str) -> None:
    if not os.path.isfile(path):
        raise errors.ConfigError(f"--weights={path}: there is no such file. Give a file, {IMAGENET} or {NONE}.")
    # Keras only warns of missing weights: the scope records which it read.
    with warnings.catch_warnings(), keras.StatelessScope(initialize_variables=False) as read:
        warnings.simplefilter("ignore")
        try:
            base.load_weights(path)
            missing = [v.path for v in base.weights if read.get_current_value(v) is None]
            why = f"{len(missing)} of {len(base.weights)} are missing, such as {missing[0]}" if missing else ""
        except Exception as error:  # h5py and Keras raise anything for foreign files
            why = errors.reason(error)
    if why:
        raise errors.ConfigError(
            f"--weights={path} does not hold the weights of {name} without its top ({why}). Give what "
            f"keras.applications.{name}(include_top=False).save_weights('FILE.weights.h5') writes."
        )
    for variable in base.weights:
        value = np.asarray(read.get_current_value(variable))
        # ImageNet's weights have deviations for variances; Keras mends that by a layer, but by its own download only.
        if variable.path.endswith("normalization/variance") and np.allclose(value, _IMAGENET_DEVIATIONS, atol=1e-3):
            value = value * _IMAGENET_DEVIATIONS
        variable.assign(value)
    for layer in base.layers:
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
