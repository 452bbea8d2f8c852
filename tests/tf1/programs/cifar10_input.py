"""Reads CIFAR-10's binary files through queues."""

import os

import tensorflow as tf

IMAGE_SIZE = 24


def read(filename_queue):
    """Returns an image [32, 32, 3] and its label of the files in a queue."""
    reader = tf.FixedLengthRecordReader(record_bytes=1 + 3 * 32 * 32)
    _, value = reader.read(filename_queue)
    record = tf.decode_raw(value, tf.uint8)
    label = tf.cast(tf.strided_slice(record, [0], [1]), tf.int32)
    depth_major = tf.reshape(tf.strided_slice(record, [1], [1 + 3 * 32 * 32]), [3, 32, 32])
    return tf.transpose(depth_major, [1, 2, 0]), label


def distorted_inputs(data_dir, batch_size):
    """Returns a batch of shuffled, distorted images and their labels."""
    files = [os.path.join(data_dir, "data_batch_%d.bin" % i) for i in range(1, 3)]
    for name in files:
        if not tf.gfile.Exists(name):
            raise ValueError("Failed to find file: " + name)
    image, label = read(tf.train.string_input_producer(files))
    image = tf.random_crop(tf.cast(image, tf.float32), [IMAGE_SIZE, IMAGE_SIZE, 3])
    image = tf.image.random_brightness(tf.image.random_flip_left_right(image), max_delta=63)
    image = tf.image.per_image_standardization(image)
    image.set_shape([IMAGE_SIZE, IMAGE_SIZE, 3])
    label.set_shape([1])
    images, labels = tf.train.shuffle_batch(
        [image, label], batch_size=batch_size, num_threads=2, capacity=16 + 3 * batch_size, min_after_dequeue=16
    )
    tf.summary.image("images", images)
    return images, tf.reshape(labels, [batch_size])
