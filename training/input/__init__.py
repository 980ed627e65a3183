"""Manifest to shuffled, resumable batches."""
