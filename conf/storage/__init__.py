"""Files and folders of all kinds of places: written whole or not at all, locked, listed, copied."""
