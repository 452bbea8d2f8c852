"""Images in folders, for tests that do not change them."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of two classes, red and blue: 10 training images each, and 3 of the test, of 32 x 32 pixels."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 3)):
        for channel, class_name in ((0, "red"), (2, "blue")):
            (root / split / class_name).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 100, [32, 32, 3], np.uint8)
                image[..., channel] += 150
                Image.fromarray(image).save(root / split / class_name / f"{i}.png")
    return root
