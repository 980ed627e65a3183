"""Rows of a dataset version as batches of TensorFlow."""
