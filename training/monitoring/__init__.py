"""Progress, metrics and profiles of a run."""
