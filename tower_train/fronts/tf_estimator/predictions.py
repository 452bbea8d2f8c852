"""The part of a model's predictions that the user asked for."""

from collections.abc import Iterator

import numpy as np

from tower_train import errors


def chosen(predictions, keys):
    """Returns the predictions of some keys, or all if there are no keys; ConfigError if none has one of them."""
    if not keys:
        return predictions
    if not isinstance(predictions, dict):
        raise errors.ConfigError(f"predict_keys={keys}: this model's predictions are a single tensor, without keys.")
    found = {key: value for key, value in predictions.items() if key in keys}
    if not found:
        raise errors.ConfigError(f"predict_keys={keys}: this model's predictions are {', '.join(predictions)}.")
    return found


def examples(batch) -> Iterator:
    """Yields the predictions for each example of a batch; GraphError if there is not one for each."""
    if not isinstance(batch, dict):
        yield from batch
        return
    lengths = {name: len(values) if np.ndim(values) else None for name, values in batch.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise errors.GraphError(
            f"predictions have these first dimensions: {lengths}; to yield single examples they must be one batch "
            "size. Use yield_single_examples=False."
        )
    for i in range(next(iter(lengths.values()))):
        yield {name: values[i] for name, values in batch.items()}
