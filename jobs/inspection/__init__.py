"""What `sluice inspect` looks at: datasets, shards, runs."""
