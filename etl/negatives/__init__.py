"""Drawn negatives: an alias table of the train split's items, and draws from it by hash."""

from etl.negatives.sampling import Negatives, add_negatives

__all__ = ["Negatives", "add_negatives"]
