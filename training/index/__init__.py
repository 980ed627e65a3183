"""Items and users of an export, and indexes of their vectors."""
