"""Encoders on tensors; `etl.encoders` executes the same on Arrow."""
