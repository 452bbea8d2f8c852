"""Other interfaces: those that TensorFlow removed, on the towers of this package."""
