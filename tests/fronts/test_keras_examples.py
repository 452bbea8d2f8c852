"""The mechanisms of keras.io's examples train in towers what plain Keras trains on one device."""

import keras
import numpy as np
import pytest
from keras_examples import EXAMPLES
from keras_twins import assert_same, fit_both

import tower_train


# Two workers train the others in test_multi_worker_models.py.
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not example.on_workers])
def test_two_towers_train_what_keras_does_on_one_device(float64, name):
    example = EXAMPLES[name]
    data = example.data()
    if isinstance(data["x"], (np.ndarray, list, dict)):
        data.setdefault("batch_size", 5)
    assert_same(fit_both(example.build, 2, example.compiled, epochs=2, **data), 1e-9)


def test_an_example_is_exported_as_the_plain_model(tmp_path):
    example = EXAMPLES["preprocessing_layers"]
    x = example.data()["x"]
    parallel = tower_train.multi_gpu_model(example.build(), gpus=2)
    parallel.export(tmp_path / "exported", verbose=False)
    served = keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")
    found = served({name: keras.ops.convert_to_tensor(values) for name, values in x.items()})
    np.testing.assert_allclose(found, parallel.template.predict(x, verbose=0), atol=1e-6)
