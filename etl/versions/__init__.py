"""Dataset versions: published, locked, listed, compared, rolled back, collected."""
