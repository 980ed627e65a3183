"""Exported models, loaded to be called: weights that processes share."""
