"""What happens in one step, in the order in which it happens."""
