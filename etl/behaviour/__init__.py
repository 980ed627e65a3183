"""What happened before an event: histories, sessions, rolling counts and rates."""
