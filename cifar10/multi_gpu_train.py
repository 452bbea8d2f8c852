"""The published cifar10_multi_gpu_train, ported to today's TensorFlow: the whole method, to be read downwards.

    python -m cifar10.multi_gpu_train --num_gpus=2

This is the method; tower_train adds what a real run needs. The code is new, but does what the published program does.
The slow parts stay: queues that handle one example at a time, `tf.nn.lrn`, weight decay in every tower, gradients
averaged by concat. Three mistakes are corrected: the loss is the mean over towers, not the last tower's; the moving
averages follow the update; the learning rate decays by epochs for any number of towers.
"""

import dataclasses
import datetime
import itertools
import math
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from cifar10 import records, source
from tower_train import config, errors
from tower_train.examples import DataRequest
from tower_train.graph import devices
from tower_train.options import DATA, TOWERS, TRAINING, Options, command_line, option

v1 = tf.compat.v1

CROP_SIZE = 24
WEIGHT_DECAY = 0.004  # of local3 and local4, which have most of the weights
INITIAL_LEARNING_RATE, DECAY_FACTOR, EPOCHS_PER_DECAY = 0.1, 0.1, 350
MOVING_AVERAGE_DECAY = 0.9999
QUEUE_FRACTION = 0.4  # of the examples, in the shuffling queue before the first step
READER_THREADS = 16
LOG_EVERY_STEPS = 10


def distorted_inputs(files: list[str], num_examples: int, batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads, distorts and shuffles one example at a time: float32 [batch, 24, 24, 3] images, int32 [batch] labels."""
    with tf.device("/cpu:0"):
        queue = v1.train.string_input_producer(files)
        _, value = v1.FixedLengthRecordReader(record_bytes=records.RECORD_BYTES).read(queue)
        record = v1.decode_raw(value, tf.uint8)
        label = tf.cast(record[0], tf.int32)
        planes = tf.reshape(record[1:], [records.CHANNELS, records.IMAGE_SIZE, records.IMAGE_SIZE])
        image = tf.cast(tf.transpose(planes, [1, 2, 0]), tf.float32)
        image = v1.random_crop(image, [CROP_SIZE, CROP_SIZE, records.CHANNELS])
        image = tf.image.random_flip_left_right(image)
        image = tf.image.random_brightness(image, max_delta=63)
        image = tf.image.random_contrast(image, lower=0.2, upper=1.8)
        image = tf.image.per_image_standardization(image)
        least = int(num_examples * QUEUE_FRACTION)  # otherwise the first batches would come from the start of the files
        return v1.train.shuffle_batch(
            [image, label], batch_size, least + 3 * batch_size, min_after_dequeue=least, num_threads=READER_THREADS
        )


def inference(images: tf.Tensor) -> tf.Tensor:
    """Builds the network: float32 [batch, 24, 24, 3] images to logits [batch, 10]."""
    conv1 = _convolution("conv1", images, 64, bias=0.0)
    pool1 = tf.nn.max_pool2d(conv1, 3, 2, "SAME")
    norm1 = tf.nn.lrn(pool1, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    conv2 = _convolution("conv2", norm1, 64, bias=0.1)
    norm2 = tf.nn.lrn(conv2, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    pool2 = tf.nn.max_pool2d(norm2, 3, 2, "SAME")
    flat = tf.reshape(pool2, [pool2.shape[0], -1])
    local3 = tf.nn.relu(_affine("local3", flat, 384, stddev=0.04, bias=0.1, decay=WEIGHT_DECAY))
    local4 = tf.nn.relu(_affine("local4", local3, 192, stddev=0.04, bias=0.1, decay=WEIGHT_DECAY))
    return _affine("softmax_linear", local4, records.NUM_CLASSES, stddev=1 / 192, bias=0.0, decay=None)


def _convolution(name, inputs, filters, bias):
    with v1.variable_scope(name):
        kernel = _variable("weights", [5, 5, inputs.shape[-1], filters], v1.truncated_normal_initializer(stddev=5e-2))
        biases = _variable("biases", [filters], v1.constant_initializer(bias))
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(inputs, kernel, [1, 1, 1, 1], padding="SAME"), biases))


def _affine(name, inputs, units, stddev, bias, decay):
    with v1.variable_scope(name):
        weights = _variable("weights", [inputs.shape[-1], units], v1.truncated_normal_initializer(stddev=stddev))
        biases = _variable("biases", [units], v1.constant_initializer(bias))
        if decay is not None:
            v1.add_to_collection("losses", decay * tf.nn.l2_loss(weights))
        return tf.matmul(inputs, weights) + biases


def _variable(name, shape, initializer):
    with tf.device("/cpu:0"):  # one copy for all towers
        return v1.get_variable(name, shape, tf.float32, initializer)


def tower_loss(scope: str | None, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the loss of the tower with this name scope, scalar: its mean cross-entropy plus the weight decay."""
    logits = inference(images)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    v1.add_to_collection("losses", tf.reduce_mean(entropy))
    return tf.add_n(v1.get_collection("losses", scope))  # of this tower only


def average_gradients(tower_grads: Sequence[list]) -> list:
    """Returns the mean over towers of each variable's gradient, from a list of (gradient, variable) per tower."""
    averaged = []
    for grads_and_vars in zip(*tower_grads, strict=True):
        stacked = tf.concat([tf.expand_dims(grad, 0) for grad, _ in grads_and_vars], axis=0)
        averaged.append((tf.reduce_mean(stacked, axis=0), grads_and_vars[0][1]))  # the variable is every tower's
    return averaged


def train(request: DataRequest, global_batch: int, after_step: Callable[[float], bool], num_gpus: int = 1) -> None:
    """Trains until after_step(mean loss) returns True, with `global_batch` examples per step over all towers.

    Tower i lives on GPU i, or without GPUs on logical CPU device i.
    """
    folder, _ = source.locate(request)
    files = [str(folder / name) for name in records.FILES["train"]]
    num_examples = len(records.read(files).labels)  # or DataError, as the queues would wait for what a file lacks
    placed = devices.place(config.DeviceOptions(num_gpus=num_gpus))
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        global_step = v1.get_variable("global_step", [], tf.int64, v1.zeros_initializer(), trainable=False)
        decay_steps = int(num_examples / global_batch * EPOCHS_PER_DECAY)
        rate = v1.train.exponential_decay(INITIAL_LEARNING_RATE, global_step, decay_steps, DECAY_FACTOR, staircase=True)
        optimizer = v1.train.GradientDescentOptimizer(rate)

        tower_grads, losses = [], []
        with v1.variable_scope(v1.get_variable_scope()):
            for i, device in enumerate(placed.towers):
                with tf.device(device), v1.name_scope(f"tower_{i}") as scope:
                    images, labels = distorted_inputs(files, num_examples, global_batch // num_gpus)
                    losses.append(tower_loss(scope, images, labels))
                    v1.get_variable_scope().reuse_variables()  # the next tower shares the variables
                    tower_grads.append(optimizer.compute_gradients(losses[-1]))

        update = optimizer.apply_gradients(average_gradients(tower_grads), global_step=global_step)
        averages = tf.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
        with tf.control_dependencies([update]):
            train_op = averages.apply(v1.trainable_variables())
        loss = tf.reduce_mean(tf.stack(losses))

        coordinator = v1.train.Coordinator()
        with v1.Session(config=placed.session_config) as session:
            session.run(v1.global_variables_initializer())
            threads = v1.train.start_queue_runners(session, coordinator)
            for step in itertools.count():
                start = time.perf_counter()
                _, value = session.run([train_op, loss])
                seconds = time.perf_counter() - start
                if math.isnan(value):
                    raise errors.NonFiniteError(f"The loss is NaN at step {step}.")
                if step % LOG_EVERY_STEPS == 0:
                    rates = f"{global_batch / seconds:.1f} examples/sec; {seconds / num_gpus:.3f} sec/batch"
                    print(f"{datetime.datetime.now()}: step {step}, loss = {value:.2f} ({rates})", flush=True)
                if after_step(float(value)):
                    break
            coordinator.request_stop()
            coordinator.join(threads)


@dataclasses.dataclass(frozen=True)
class PortOptions(Options):
    """Options of the command."""

    num_gpus: int = option(1, "number of towers", TOWERS, allowed="at least 1")
    batch_size: int = option(128, "examples per tower and step", TRAINING, allowed="at least 1")
    max_steps: int = option(1000, "steps after which to stop", TRAINING, allowed="at least 1")
    dataset: str = option("auto", "cifar10, generated, or auto: cifar10 if it can be had", DATA, source.DATASETS)
    data_dir: str | None = option(None, "directory of the data (~/.cache/tower_train)", DATA)


def main(argv: Sequence[str]) -> int:
    options = command_line.parse(argv, PortOptions, __doc__)
    v1.logging.set_verbosity(v1.logging.ERROR)  # otherwise TensorFlow warns about each queue
    request, steps = DataRequest("train", options.dataset, options.data_dir), itertools.count(1)
    global_batch = options.batch_size * options.num_gpus
    train(request, global_batch, lambda _: next(steps) == options.max_steps, options.num_gpus)
    return 0


if __name__ == "__main__":
    command_line.run(main)
