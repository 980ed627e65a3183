"""The HTML report of a run: what was read, what was learnt, how good it is, in one file."""
