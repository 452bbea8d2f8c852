"""Custom training steps of models: `tower_step` runs in all towers, which wait for each other at each yield."""
