"""Layers of an application of Keras on several GPUs, on made-up images: GPUS OPTIMIZER."""

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "0, 1"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras.applications import VGG19  # noqa: E402
from keras.layers import Dense, Flatten  # noqa: E402
from keras.models import Model  # noqa: E402
from keras.utils.training_utils import multi_gpu_model  # noqa: E402

size, num_gpus, num_samples, num_classes = 32, int(sys.argv[1]), 4, 10
tf.set_random_seed(1)
np.random.seed(1)
with tf.device("/cpu:0"):
    network = VGG19(weights=None, include_top=False, input_shape=(size, size, 3))
    features = Flatten()(network.get_layer("block2_pool").output)
    model = Model(network.input, Dense(num_classes, activation="softmax")(features))
parallel_model = multi_gpu_model(model, gpus=num_gpus)
parallel_model.compile(loss="categorical_crossentropy", optimizer=sys.argv[2], metrics=["acc"])

x = np.random.random((num_samples, size, size, 3))
y = np.random.random((num_samples, num_classes))
history = parallel_model.fit(x, y, epochs=2, batch_size=2 * num_samples, shuffle=False, verbose=2)
print("losses", history.history["loss"], "of", len(history.history["acc"]))
model.save("my_model.h5")
