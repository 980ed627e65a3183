"""What a finished run has measured, made up: its steps, epochs and evaluation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def build_steps(lines: int = 40) -> str:
    """Returns `metrics.jsonl`, a line per ten steps."""
    entries = [
        {"step": 10 * n, "epoch": 1, "loss": 1 / n, "examples_per_s": 9e4, "input_wait_share": 0.02}
        for n in range(1, lines + 1)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def build_epochs() -> list[dict[str, Any]]:
    """Returns eight epochs, the sixth the best on validation."""
    ndcg = (0.061, 0.084, 0.102, 0.113, 0.1181, 0.1207, 0.1199, 0.1192)
    return [
        {
            "epoch": epoch + 1,
            "loss": 3.1 + 2.2 * float(np.exp(-epoch / 2.2)),
            "seconds": 5.3 + 0.1 * (epoch % 3),
            "examples": 93_184,
            "examples_per_s": 17_400 - 110 * epoch,
            "input_wait_share": 0.031,
            "validation": {"ndcg@10": ndcg[epoch], "hit_rate@10": ndcg[epoch] * 1.9},
        }
        for epoch in range(8)
    ]


def build_metrics() -> dict[str, Any]:
    """Returns an evaluation in which the model is well ahead of popularity."""
    protocols = [
        _protocol("full_unseen", True, 803, (0.052, 0.146, 0.2213, 0.322, 0.497), 0.42),
        _protocol("full_all", False, 803, (0.041, 0.121, 0.187, 0.281, 0.452), 0.3),
        _protocol("sampled_99", True, 100, (0.21, 0.47, 0.6202, 0.77, 0.935), 0.62),
    ]
    return {
        "split": "test", "rows": 1500, "users": 1500, "oov_targets": 3, "headline": "full_unseen",
        "protocols": protocols,
        "labels": {"rows": 1500, "auc": 0.6831, "log_loss": None,
                   "constant": {"auc": 0.5, "log_loss": 0.6854}},
        "beyond_accuracy": {"coverage@10": 0.638, "popularity_percentile@10": 0.7812},
    }  # fmt: skip


def _protocol(
    name: str, mask: bool, candidates: int, hits: tuple[float, ...], weaker: float
) -> dict[str, Any]:
    def system(factor: float) -> dict[str, float]:
        values = {"mrr": hits[1] * factor * 0.7}
        for k, hit in zip((1, 5, 10, 20, 50), hits, strict=True):
            values[f"hit_rate@{k}"] = values[f"recall@{k}"] = hit * factor
            values[f"ndcg@{k}"] = hit * factor * (1.0 if k == 1 else 0.62 - 0.002 * k)
        return values

    systems = {"model": system(1.0), "popularity": system(weaker), "random": system(0.06)}
    return {"name": name, "mask_seen": mask, "candidates": candidates, "systems": systems}
