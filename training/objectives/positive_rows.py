"""Rows as positives: refuses rows of label 0 where an objective would teach them as liked."""

from __future__ import annotations

import numpy as np

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.objectives import ItemSettings
from training.input.train_counts import read_train_rows
from training.objectives.user_items import TrainRows
from training.reader.filters import passes


def refuse_negative_rows(config: ItemSettings, kind: str, train: TrainRows) -> None:
    """Refuses to take rows for positives whose label says that they are none.

    Rows that the input leaves out, and rows of weight 0, teach nothing. Rows of `input.mix` are
    taught like those of the dataset itself.

    Args:
        config: The objective's config.
        kind: Its name.
        train: The rows that are trained on.

    Raises:
        ConfigError: The label has two classes in train, and rows of label 0 are among the rows.
        InputDataError: A record is damaged.
    """
    if config.positives == "every_row":
        return
    weight = train.manifest.find_weight()  # Of the mixed datasets the same feature is read.
    for part in train.parts:
        _refuse_part(kind, part, weight)


def _refuse_part(kind: str, train: TrainRows, weight: str | None) -> None:
    manifest, source = train.manifest, train.config or InputConfig()
    label, all_rows = manifest.keys.label, manifest.split("train").rows
    negatives = count_negatives(manifest)
    if label is None or not negatives or _leaves_out(source, label):
        return
    what = f"{negatives:,} of {all_rows:,} rows of train have label 0"
    if weight is not None or source.filter:
        rows, negatives = _count_taught(train, label, weight)
        what = f"{negatives:,} of {rows:,} rows that are trained on have label 0"
        what += "" if weight is None else f" and a weight ({weight}) above 0"
    if negatives:
        raise ConfigError(
            f"{kind} takes every row for a positive, and the label says that some are negatives",
            received=f"{what} (feature {label} of {manifest.dataset_name})",
            allowed="rows of label 1 alone, or an objective that reads the label",
            fix="leave them out: build with events.where, or set "
            f"input.filter=[{{feature: {label}, value: 1}}]; or give them weight 0 "
            "(weights.negative in the build); or learn from them: model.objective={kind: binary}; "
            "or say that every row counts: model.objective.positives=every_row",
        )


def count_negatives(manifest: Manifest) -> int:
    """Returns how many rows of train have label 0; 0 where the label has not two classes."""
    found = manifest.statistics.get("train", {}).get(manifest.keys.label or "", {})
    is_binary = (found.get("min"), found.get("max")) == (0, 1)
    if not is_binary or found.get("distinct", {}).get("count") != 2:
        return 0
    return int(found.get("zeros", 0))


def _leaves_out(source: InputConfig, label: str) -> bool:
    """Whether the input reads no row of label 0."""
    balance = source.class_balance
    has_no_share = balance is not None and balance.feature == label and not balance.shares.get(0)
    return has_no_share or not passes(source, label, 0.0)


def _count_taught(train: TrainRows, label: str, weight: str | None) -> tuple[int, int]:
    """Counts the rows that are trained on, and those of label 0 that weigh something."""
    rows = negatives = 0
    where = (train.version_dir, train.manifest, train.config or InputConfig())
    for part in read_train_rows(*where, [label, weight or label]):
        columns = part.dense
        is_negative = np.asarray(columns[label]).reshape(-1) == 0
        if weight is not None:
            # A scalar may come as a list of one.
            is_negative &= np.asarray(columns[weight]).reshape(len(is_negative)) > 0
        rows += len(is_negative)
        negatives += int(np.count_nonzero(is_negative))
    return rows, negatives
