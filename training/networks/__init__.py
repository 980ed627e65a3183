"""Layers and networks over embedded features."""
