"""Sources of examples: arrays, idx and TFRecord files, image folders, tf.data, and files that are downloaded."""


def __getattr__(name):
    if name != "image_folder":  # the public name of `images`
        raise AttributeError(f"module 'tower_train.data' has no attribute {name!r}")
    from tower_train.data import images

    return images
