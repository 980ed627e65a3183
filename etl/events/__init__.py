"""The event log: joined, labelled, split, and what happened before each event."""
