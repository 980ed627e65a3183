"""The training side: shards in, checkpoints, metrics and SavedModels out. Never imports Spark."""
