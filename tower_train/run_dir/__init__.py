"""A run on disk: directory and lock, manifest, checkpoints, recovery, best, metrics and event files."""
