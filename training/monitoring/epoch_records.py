"""Records of epochs in `history.json`, and the result of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conf.artefacts.run import HISTORY_FILE
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.metrics import LOSS_METRIC, OWN_PREFIX, find_family
from conf.storage.atomic_output import write_text_atomic


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: One-based.
        loss: Mean training loss over the epoch's rows.
        seconds: Wall time of the training steps, validation apart.
        examples: Rows trained on.
        examples_per_s: Rows per second of training.
        input_wait_share: Share of the time that steps waited for their batch, in [0, 1].
        validation: Validation metrics by name; empty where nothing is validated on.
        left_out: What the input left out of the epoch, by kind: `bad_records`, `shards`,
            `filtered_rows`; empty where it left nothing out.
        tables: What has happened to the keys of dynamic tables in the epoch, by table: `keys` with
            a row at its end and `bytes` of memory; with rules also `waiting` keys, keys
            `admitted` and `evicted`, lookups `rejected` and (of a full table) `refused`; of two
            tiers rows that were on the device (`device_hits`), those `swapped` in, and
            `device_bytes`.
    """

    epoch: int
    loss: float
    seconds: float
    examples: int
    examples_per_s: float
    input_wait_share: float
    validation: Mapping[str, float]
    left_out: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Returns a metric as it was measured.

        The loss is that of the held-out rows where they give one, else that of training.

        Raises:
            ConfigError: The epoch has no such metric.
        """
        return _find_value(name, {LOSS_METRIC: self.loss, **self.validation})


@dataclass(frozen=True)
class StepValidation:
    """What a validation between the ends of epochs found.

    Attributes:
        step: Steps of the run so far.
        epoch: One-based epoch.
        validation: Metrics by name.
    """

    step: int
    epoch: int
    validation: Mapping[str, float]

    def value(self, name: str) -> float:
        """Returns a metric as it was measured.

        Raises:
            ConfigError: There is no such metric.
        """
        return _find_value(name, self.validation)


def _find_value(name: str, found: Mapping[str, float]) -> float:
    """The metric; NaN where one of one's own, whose name was checked before, is not defined."""
    if find_family(name).startswith(OWN_PREFIX):
        return found.get(name, math.nan)
    if name not in found:
        names = sorted(found)
        raise ConfigError(
            "fit.early_stopping.metric is not among the validation metrics",
            received=name,
            allowed=", ".join(names),
            fix=_advise(name, names),
        )
    return found[name]


def _advise(name: str, names: Sequence[str]) -> str:
    if name.rpartition("/")[2] in ("auc", "gauc"):
        return (
            "the held-out labels are of one class (for gauc: those of each user), so that no pair "
            "can be ordered; set fit.early_stopping.metric=log_loss"
        )
    return did_you_mean(name, names) + "; cut-offs are set by evaluation.ks"


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        best_epoch: One-based epoch whose weights, or in which the weights, are kept as the best.
        best_step: Steps after which these were validated, where validations of steps choose them.
        selected_by: Metric that chose the epoch or the step; None: the last epoch is kept.
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
    best_step: int | None = None
    selected_by: str | None = None


def write_history(run: Path, history: Sequence[EpochRecord]) -> None:
    """Writes `history.json` atomically."""
    entries = [asdict(record) for record in history]
    write_text_atomic(run / HISTORY_FILE, json.dumps(entries, indent=1) + "\n")


def read_history(run: Path) -> list[EpochRecord]:
    """Reads `history.json`; a run that has not ended an epoch has an empty one.

    Raises:
        InputDataError: The file is damaged.
    """
    file = run / HISTORY_FILE
    if not file.exists():
        return []
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return [EpochRecord(**entry) for entry in entries]
    except (ValueError, TypeError) as error:
        raise InputDataError(f"{file} is damaged", received=repr(error)) from error


def read_resumed_history(run: Path, finished: int, newest: int) -> list[EpochRecord]:
    """Reads the entries of the epochs that a resumed run goes on from.

    An epoch's entry is written before its checkpoint, so one entry more than there are
    checkpoints is what a kill in between leaves.

    Args:
        run: Directory of the run.
        finished: Epochs that the restored checkpoint has behind it.
        newest: Epoch of the newest checkpoint, which is later where damaged ones were passed over.

    Raises:
        InputDataError: The file is damaged, or does not belong to the checkpoints.
    """
    records = read_history(run)
    epochs = [record.epoch for record in records]
    if epochs != list(range(1, len(epochs) + 1)) or not finished <= len(epochs) <= newest + 1:
        raise InputDataError(
            "the history of this run does not fit its checkpoints",
            received=f"{run / HISTORY_FILE} with {len(epochs)} epochs, "
            f"a checkpoint of epoch {newest}",
            allowed=f"epochs 1 to {newest}, or one more",
            fix="restore the missing files, or train again without --resume",
        )
    return records[:finished]
