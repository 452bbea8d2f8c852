"""The graph of one step, its modules in the order in which things happen."""
