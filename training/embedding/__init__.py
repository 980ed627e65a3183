"""Embedding tables, and the optimizer that touches only the rows of a batch."""
