"""The stages of a build: each with what it refuses of a config, and what it does to rows."""
