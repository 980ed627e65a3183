"""Ranking and classification metrics of a trained model."""
