"""Tables that other systems saved: found under a path, and read as keys and rows."""
