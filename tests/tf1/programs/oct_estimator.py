"""VGG16's first blocks, the first frozen, on folders of retinal images: FOLDER."""

import os
import sys

import tensorflow as tf

LABELS = ["CNV", "DME", "DRUSEN", "NORMAL"]
SIZE = (32, 32)


def input_fn(
    file_pattern,
    labels,
    image_size=SIZE,
    shuffle=False,
    batch_size=64,
    num_epochs=None,
    buffer_size=4096,
    prefetch_buffer_size=None,
):
    table = tf.contrib.lookup.index_table_from_tensor(mapping=tf.constant(labels))

    def _map_func(filename):
        label = tf.string_split([filename], delimiter=os.sep).values[-2]
        image = tf.image.decode_jpeg(tf.read_file(filename), channels=3)
        image = tf.image.convert_image_dtype(image, dtype=tf.float32)
        image = tf.image.resize_images(image, size=image_size)
        return image, tf.one_hot(table.lookup(label), len(labels))

    dataset = tf.data.Dataset.list_files(file_pattern, shuffle=shuffle)
    if num_epochs is not None and shuffle:
        dataset = dataset.apply(tf.contrib.data.shuffle_and_repeat(buffer_size, num_epochs))
    elif shuffle:
        dataset = dataset.shuffle(buffer_size)
    elif num_epochs is not None:
        dataset = dataset.repeat(num_epochs)
    mapped = tf.contrib.data.map_and_batch(map_func=_map_func, batch_size=batch_size, num_parallel_calls=os.cpu_count())
    return dataset.apply(mapped).prefetch(buffer_size=prefetch_buffer_size)


keras_vgg16 = tf.keras.applications.VGG16(input_shape=SIZE + (3,), include_top=False, weights=None)
output = tf.keras.layers.Flatten()(keras_vgg16.get_layer("block2_pool").output)
predictions = tf.keras.layers.Dense(len(LABELS), activation=tf.nn.softmax)(output)
model = tf.keras.Model(inputs=keras_vgg16.input, outputs=predictions)
for layer in keras_vgg16.layers[:4]:
    layer.trainable = False
model.compile(loss="categorical_crossentropy", optimizer=tf.train.AdamOptimizer(), metrics=["accuracy"])
strategy = tf.contrib.distribute.MirroredStrategy(num_gpus=2)
config = tf.estimator.RunConfig(train_distribute=strategy)
estimator = tf.keras.estimator.model_to_estimator(model, config=config)
files = os.path.join(sys.argv[1], "{}", "*", "*.jpeg")
estimator.train(lambda: input_fn(files.format("train"), LABELS, shuffle=True, batch_size=4, num_epochs=1))
print(estimator.evaluate(lambda: input_fn(files.format("test"), LABELS, batch_size=4, num_epochs=1)))
