"""Publishing (ADR 20): entries are staged, whole when they have their name, and pointed at last."""
