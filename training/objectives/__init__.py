"""Losses, the sampling of negatives, and its corrections."""
