"""The benchmark: every side in a process of its own, measured in turns."""
