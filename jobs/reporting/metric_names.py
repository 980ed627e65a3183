"""Names of ranking metrics, as people write them and in the order in which they read them."""

from __future__ import annotations

_TITLES = {"hit_rate": "HR", "ndcg": "NDCG", "recall": "Recall", "mrr": "MRR", "loss": "Loss"}
_FAMILIES = ("hit_rate", "ndcg", "recall", "mrr")


def metric_title(metric: str) -> str:
    """Returns a metric's name as papers write it: `hit_rate@10` -> `HR@10`."""
    family, at, k = metric.partition("@")
    return f"{_TITLES.get(family, family)}{at}{k}"


def metric_order(metric: str) -> tuple[int, str, int]:
    """Returns a sort key: by family, then by cut-off as a number."""
    family, _, k = metric.partition("@")
    rank = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
    return rank, family, int(k) if k.isdigit() else 0
