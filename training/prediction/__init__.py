"""Ranked lists of items and scores of rows by a trained model, written as files."""
