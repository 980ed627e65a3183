"""Summaries of datasets, shards, files and runs for `sluice inspect`."""
