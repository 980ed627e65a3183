"""Models: tables, a network and what its output means; the registry."""
