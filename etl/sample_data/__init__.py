"""Sample data: a seeded MovieLens-like generator and the download of real archives."""
