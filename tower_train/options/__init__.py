"""Options: their declaration, the rules between them, and command lines. No TensorFlow here."""

from tower_train.options.declare import (
    ARITHMETIC,
    DATA,
    FAULTS,
    LEARNING_RATE,
    MACHINES,
    OPTIMIZER,
    REPORTS,
    RUN,
    TOWERS,
    TRAINING,
    Options,
    as_text,
    option,
)

__all__ = ["ARITHMETIC", "DATA", "FAULTS", "LEARNING_RATE", "MACHINES", "OPTIMIZER", "REPORTS", "RUN", "TOWERS",
           "TRAINING", "Options", "as_text", "option"]  # fmt: skip
