"""Sources of examples: arrays, idx and TFRecord files, image folders, tf.data, and files that are downloaded."""
