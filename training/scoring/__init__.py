"""Batch scoring of an exported model on executors that have TensorFlow and no Sluice."""
