"""Programs of TensorFlow 1 as they were published: what names they use (source), and where these are today (names)."""
