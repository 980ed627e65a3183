"""The commit of an output directory: save modes, attempts, what is visible after a crash."""
