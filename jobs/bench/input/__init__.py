"""Benchmark of the trainer's input."""
