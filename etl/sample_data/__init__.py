"""Sample data: logs of ratings (`ratings.py` draws, `logs.py` writes), public archives."""
