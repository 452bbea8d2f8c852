"""A trained network in use: a saved run, evaluation, prediction, export."""
