"""Encoders on tensors, a file per family; `etl.encoders` executes the same on Arrow."""
