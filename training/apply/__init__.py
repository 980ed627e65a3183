"""Applies exported models: ranked lists, scores and vectors of rows."""
