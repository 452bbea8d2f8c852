"""Programs of TensorFlow 1 as they were published: their names, on today's TensorFlow."""
