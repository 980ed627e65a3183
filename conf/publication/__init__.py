"""Publishing: entries are staged, whole when they have their name, and pointed at last."""
