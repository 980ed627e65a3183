"""What `sluice inspect` shows of datasets, shards, files and runs."""
