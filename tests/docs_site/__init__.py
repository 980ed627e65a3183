"""Pages of the documentation that are made from the code, and what its tests read of it."""
