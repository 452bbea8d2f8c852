import pytest
import trainings


@pytest.fixture(scope="session")
def open_training():
    """trainings.opened."""
    return trainings.opened
