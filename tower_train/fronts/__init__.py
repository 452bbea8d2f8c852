"""Other ways in: the interfaces that TensorFlow removed, on the towers of this package."""
