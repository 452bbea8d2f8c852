"""Training steps of a model's own: its `tower_step` runs in all towers, which wait for each other at each yield."""
