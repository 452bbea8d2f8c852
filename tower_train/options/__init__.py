"""Options: their declaration, the rules between them, and command lines. No TensorFlow here."""

from tower_train.options.declare import DATA, MACHINES, REPORTS, RUN, TOWERS, TRAINING, Options, as_text, option

__all__ = ["DATA", "MACHINES", "REPORTS", "RUN", "TOWERS", "TRAINING", "Options", "as_text", "option"]
