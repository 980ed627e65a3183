"""Configs of `sluice train`, and of the evaluation, export and prediction that follow it."""
