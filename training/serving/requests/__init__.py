"""What clients send: read, measured against limits, refused."""
