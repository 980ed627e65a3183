"""Training with parameter servers: a chief, workers, and the processes that hold the variables."""
