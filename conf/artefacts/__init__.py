"""What runs, exports and deltas hold: names of their files, and their cards."""
