"""A Keras network as an Estimator on Fashion-MNIST: FOLDER GPUS BATCH_SIZE."""

import sys
import time

import numpy as np
import tensorflow as tf
from tensorflow.contrib.learn.python.learn.datasets.mnist import read_data_sets

NUM_GPUS, BATCH_SIZE, EPOCHS = int(sys.argv[2]), int(sys.argv[3]), 2
data = read_data_sets(sys.argv[1], one_hot=True, reshape=False, validation_size=0)
train_images, train_labels = data.train.images, data.train.labels.astype(np.float32)
test_images, test_labels = data.test.images, data.test.labels.astype(np.float32)

inputs = tf.keras.Input(shape=(28, 28, 1))
x = tf.keras.layers.Conv2D(filters=4, kernel_size=(3, 3), activation=tf.nn.relu)(inputs)
x = tf.keras.layers.MaxPooling2D(pool_size=(2, 2), strides=2)(x)
x = tf.keras.layers.Flatten()(x)
predictions = tf.keras.layers.Dense(10, activation=tf.nn.softmax)(x)
model = tf.keras.Model(inputs=inputs, outputs=predictions)
optimizer = tf.train.AdamOptimizer(learning_rate=0.001)
model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])

strategy = tf.contrib.distribute.MirroredStrategy(num_gpus=NUM_GPUS)
config = tf.estimator.RunConfig(train_distribute=strategy, tf_random_seed=3)
estimator = tf.keras.estimator.model_to_estimator(model, config=config)


def input_fn(images, labels, epochs, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.shuffle(5000, seed=4).repeat(epochs).batch(batch_size).prefetch(2)


class TimeHistory(tf.train.SessionRunHook):
    def begin(self):
        self.times = []

    def before_run(self, run_context):
        self.iter_time_start = time.time()

    def after_run(self, run_context, run_values):
        self.times.append(time.time() - self.iter_time_start)


time_hist = TimeHistory()
estimator.train(lambda: input_fn(train_images, train_labels, EPOCHS, BATCH_SIZE), hooks=[time_hist])
print("total time with %d GPUs: %f seconds" % (NUM_GPUS, sum(time_hist.times)))
print("%f images/second with %d GPUs" % (BATCH_SIZE * NUM_GPUS / np.mean(time_hist.times), NUM_GPUS))
print(estimator.evaluate(lambda: input_fn(test_images, test_labels, 1, BATCH_SIZE)))
