"""How a training run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        best_epoch: One-based epoch whose weights are kept as the best.
        epochs: Epochs that ran, those before a resume included.
        steps: Batches trained on in all, those that overflowed a loss scale included.
        stopped_early: Whether early stopping ended the run.
        left_out: What the input left out of the last epoch; see `EpochRecord`.
    """

    best_epoch: int
    epochs: int
    steps: int
    stopped_early: bool
    left_out: Mapping[str, int]
