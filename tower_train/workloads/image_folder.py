"""Any classification set laid out as split/class/*.jpg: --workload=tower_train.workloads.image_folder --data_dir=DIR

Trains a small network (four convolutions with pooling, the mean over the picture, a softmax layer) or, with --network,
one of keras.applications.
"""

import dataclasses
import functools

import tensorflow as tf

from tower_train import errors, layers
from tower_train.data import augmentation, image_files, image_labels, images
from tower_train.examples import SPLITS
from tower_train.files import data_directory
from tower_train.options import AUGMENTATION, DATA, option
from tower_train.workload import DataRequest, Examples, Workload
from tower_train.workloads import applications

v1 = tf.compat.v1

_CHANNELS = {"grayscale": 1, "rgb": 3}
_SMALL = "small"
NETWORK = "Network"
# The variance 2 / inputs, which rectified layers keep: He et al. 2015, "Delving deep into rectifiers", section 2.2.
_INITIALIZER = v1.variance_scaling_initializer(2.0)


@dataclasses.dataclass(frozen=True)
class FolderOptions(augmentation.PlacedImageOptions):
    image_size: int = option(
        224, "height and width, in pixels, that images are resized to", DATA, allowed="at least 16", resume="same"
    )
    color: str = option(
        "rgb", "grayscale or rgb, to which all files are converted", DATA, allowed=tuple(_CHANNELS), resume="same"
    )
    flip: bool = option(True, "flip half of the training images left to right", AUGMENTATION)
    cache: str = option(
        "auto",
        "place of decoded images: none, memory, disk, or auto: memory if they fit well",
        DATA,
        allowed=images.CACHES,
    )
    skip_bad_images: bool = option(False, "go on without the files that are no images", DATA)
    group_pattern: str = option(
        "",
        "regular expression for the group (such as the patient) in a file's name, or a table of groups, "
        "FILE.csv:COLUMN; --validation_fraction splits no group",
        DATA,
        resume="same",
    )
    labels: str = option(
        image_labels.FOLDERS,
        "place of the classes: folders (CLASS/*.jpg), names (the class of cat.0.jpg is cat), "
        "or a CSV file of images and classes, FILE.csv or FILE.csv:COLUMN, in --data_dir",
        DATA,
        resume="same",
    )
    network: str = option(
        _SMALL,
        "small (four convolutions), or a network of keras.applications, such as VGG16, under a new classifier",
        NETWORK,
        allowed=(_SMALL, *applications.NAMES),
        resume="same",
    )
    weights: str = option(
        applications.NONE,
        "first weights of --network: a FILE that Keras wrote, imagenet, or none (random weights)",
        NETWORK,
        resume="note",
    )
    freeze_until: str = option(
        "", "train only layers of --network after this one, e.g. block4_pool of VGG16", NETWORK, resume="same"
    )
    freeze_epochs: float = option(
        0.0, "epochs in which only the new classifier is trained", NETWORK, allowed="at least 0", resume="same"
    )
    unfreeze_rate: float = option(
        0.1, "then factor of the other layers' rate", NETWORK, "above 0", resume="note", needs=("freeze_epochs",)
    )

    def check(self):
        if self.network == _SMALL:
            for name in ("weights", "freeze_until", "freeze_epochs"):
                if (value := getattr(self, name)) != getattr(FolderOptions, name):
                    raise errors.ConfigError(f"--{name}={value} is for a network of keras.applications: add --network.")
        elif self.color != "rgb":
            raise errors.ConfigError(
                f"--network={self.network} takes images in three channels, which --color={self.color} does not give. "
                "Leave --color out: files in grayscale are read as rgb too."
            )
        if self.freeze_epochs and self.weights == applications.NONE:
            raise errors.ConfigError(f"--freeze_epochs={self.freeze_epochs:g} needs trained weights: add --weights.")


def workload(options: FolderOptions) -> Workload:
    is_small = options.network == _SMALL
    own_prepare = prepare if is_small else applications.preprocessing(options.network)

    def examples(request: DataRequest) -> Examples | None:
        if request.data_dir is None:
            raise errors.ConfigError("--data_dir is missing. Name the folder that holds train/CLASS/*.jpeg.")
        directory = data_directory(request.data_dir)
        listing = image_files.find(
            directory, request.split, request.validation_fraction, options.group_pattern, request.seed, options.labels
        )
        if not listing:
            return None
        examples = images.examples(
            listing,
            f"{directory} {listing.split}",
            options.image_size,
            _CHANNELS[options.color],
            options.cache,
            options.skip_bad_images,
        )
        notices = [None if is_small else applications.notice(options), examples.notice]
        return dataclasses.replace(examples, notice=" ".join(filter(None, notices)) or None)

    return Workload(
        name="image_folder",
        examples=examples,
        inference=None,
        inference_for=lambda examples: (
            functools.partial(inference, num_classes=len(examples.class_names))
            if is_small
            else applications.network(options, len(examples.class_names))
        ),
        **augmentation.functions(options, own_prepare),
        prepare=own_prepare,
        augments_on_devices=True,
        splits=SPLITS,
        options=options,
        configure=workload,
        recipe={"optimizer": "adam", "learning_rate": 0.001, "learning_rate_decay_factor": 1.0, "batch_size": 32},
    )


def inference(images: tf.Tensor, training: bool, num_classes: int) -> tf.Tensor:
    """Builds four convolutions, each followed by pooling, the mean over the remaining pixels, and a softmax layer.

    From images [batch, size, size, channels] to logits [batch, num_classes].
    """
    del training  # no layer behaves differently in it
    maps = images
    for i, (width, filters) in enumerate([(5, 32), (3, 64), (3, 128), (3, 128)], start=1):
        with v1.variable_scope(f"conv{i}"):
            weights = layers.weights([width, width, maps.shape[-1], filters], maps.dtype, _INITIALIZER)
            maps = tf.nn.conv2d(maps, weights, strides=2 if i == 1 else 1, padding="SAME")
            maps = tf.nn.relu(tf.nn.bias_add(maps, layers.biases(maps)))
        maps = tf.nn.max_pool2d(maps, ksize=2, strides=2, padding="SAME")
    features = tf.reduce_mean(maps, axis=[1, 2])
    with v1.variable_scope("softmax_linear"):
        return layers.affine(features, num_classes, _INITIALIZER)


def prepare(images: tf.Tensor) -> tf.Tensor:
    """Scales 0..255 to -1..1: float32 of the same shape."""
    # Not a division: TensorFlow turns one by a constant into this in a graph, but not in a tf.data pipeline, so
    # exported and evaluated values would differ in the last bit.
    return tf.cast(images, tf.float32) * (1 / 127.5) - 1


WORKLOAD = workload(FolderOptions())
