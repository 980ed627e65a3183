"""Models that answer: versions as they are loaded, calls that share a batch, their counts."""
