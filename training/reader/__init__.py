"""Shards of a dataset version to rows in memory, without TensorFlow."""
