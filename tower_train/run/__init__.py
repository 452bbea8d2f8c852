"""A run: the session, its steps, saving, evaluations, and how it ends."""
