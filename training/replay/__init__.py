"""Runs on other data than their own: later versions of a dataset, exports, raw values."""
