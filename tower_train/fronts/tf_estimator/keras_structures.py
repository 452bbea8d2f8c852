"""The features and labels of an input_fn in the structure of a Keras model's inputs and outputs, and back."""

import keras

from tower_train import errors


def without_weights(features):
    """Returns the features, and the examples' weights among them or None."""
    if isinstance(features, dict) and features.keys() == {"features", "sample_weights"}:
        return features["features"], features["sample_weights"]
    return features, None


def arranged_features(model: keras.Model, features):
    """Returns features as the model takes them, a dict's by the names of its inputs; GraphError if one is missing."""
    if not isinstance(features, dict):
        return features
    if isinstance(model, keras.Sequential) and len(features) == 1:
        return next(iter(features.values()))  # its input has no name that a user would know
    wanted = getattr(model, "input", None)
    if wanted is None or isinstance(wanted, dict):
        return features
    missing = [tensor.name for tensor in keras.tree.flatten(wanted) if tensor.name not in features]
    if missing:
        raise errors.GraphError(
            f"input_fn gives the features {', '.join(features)}; the model's inputs {', '.join(missing)} are missing. "
            "Name features as the model's Input layers."
        )
    return keras.tree.map_structure(lambda tensor: features[tensor.name], wanted)


def arranged_labels(model: keras.Model, labels, outputs):
    """Returns labels as the model's outputs are, a dict's by the names of the outputs; GraphError if one has none."""
    if not isinstance(labels, dict) or isinstance(outputs, dict):
        return labels
    names = output_names(model, outputs)
    unknown = [name for name in labels if name not in names]
    if unknown:
        raise errors.GraphError(
            f"input_fn gives the labels {', '.join(map(str, unknown))}; the model's outputs are {', '.join(names)}. "
            "Name labels as the model's last layers."
        )
    if len(labels) < len(names):
        return labels  # Keras knows which outputs have no loss
    return keras.tree.pack_sequence_as(outputs, [labels[name] for name in names])


def by_name(model: keras.Model, outputs) -> dict:
    """Returns the outputs as a dict."""
    if isinstance(outputs, dict):
        return outputs
    return dict(zip(output_names(model, outputs), keras.tree.flatten(outputs), strict=True))


def output_names(model: keras.Model, outputs) -> list[str]:
    """Returns the names of the outputs, in their order."""
    if isinstance(model, keras.Sequential):
        return [model.layers[-1].name]
    count = len(keras.tree.flatten(outputs))
    return getattr(model, "output_names", None) or [f"output_{i + 1}" for i in range(count)]
