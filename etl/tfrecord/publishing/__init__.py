"""How shards become visible: attempts, commits, modes, leftovers; files and objects."""
