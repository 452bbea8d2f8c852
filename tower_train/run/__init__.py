"""A run: the session, its hooks, saving, evaluations, and how it ends."""
