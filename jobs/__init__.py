"""Entry points: each module parses a config, calls one side, logs, returns an exit code."""
