"""Ranked lists: `/v1/recommend`, and what its models are given."""
