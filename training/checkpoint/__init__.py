"""Checkpoints of a run: the newest, to resume from, and the best, to use."""
