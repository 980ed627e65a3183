"""Sample data: the demo's logs (`movielens.py`), click sequences (`clicks.py`), real archives."""
