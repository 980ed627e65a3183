"""Rows of label 0 are not taught as positives, unless the config says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.objectives import BinaryConfig, BPRConfig, SampledSoftmaxConfig, SoftmaxConfig
from training.input.batches import build_eval_dataset
from training.objectives import user_items
from training.objectives.item_objectives import refuse_negative_rows
from training.objectives.user_items import TrainRows


@pytest.fixture
def rows(tiny_version: Path, tiny_manifest: Manifest) -> dict[str, np.ndarray]:
    names = ["label", "user_id", "movie_id"]
    batch = next(iter(build_eval_dataset(tiny_version, tiny_manifest, "train", 10_000, names)))
    return {name: value.numpy() for name, value in batch.items()}


@pytest.fixture
def labelled(tiny_manifest: Manifest, rows: dict[str, np.ndarray]) -> Manifest:
    """The tiny manifest with what a build says of the label."""
    zeros = int((rows["label"] == 0).sum())
    found = {"min": 0.0, "max": 1.0, "zeros": zeros, "distinct": {"count": 2}}
    return replace(tiny_manifest, statistics={"train": {"label": found}})


def check(version: Path, manifest: Manifest, config: Any = None, **source: Any) -> None:
    train = TrainRows(version, manifest, 32, InputConfig.model_validate(source))
    refuse_negative_rows(config or SampledSoftmaxConfig(), train)


@pytest.mark.parametrize(
    "objective", [SampledSoftmaxConfig, SoftmaxConfig, BPRConfig, BinaryConfig]
)
def test_rows_of_label_0_are_counted_and_refused(
    objective: Any, tiny_version: Path, labelled: Manifest, rows: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ConfigError, match=f"{(rows['label'] == 0).sum():,} rows of tiny"):
        check(tiny_version, labelled, objective())
    check(tiny_version, labelled, objective(positives="every_row"))


def test_rows_that_are_mixed_in_are_looked_at_too(
    tiny_version: Path, tiny_manifest: Manifest, labelled: Manifest, monkeypatch: Any
) -> None:
    mixed = {"mix": [{"dataset": "other", "weight": 0.3}]}
    other = replace(labelled, dataset_name="other")
    monkeypatch.setattr(user_items, "find_mixed", lambda *_: [(tiny_version, other)])
    with pytest.raises(ConfigError, match="rows of other"):
        check(tiny_version, tiny_manifest, **mixed)


@pytest.mark.parametrize(
    "source",
    [
        {"filter": [{"feature": "label", "op": ">=", "value": 0.5}]},
        {"filter": [{"feature": "label", "op": "not_in", "value": [0]}]},
        {"class_balance": {"feature": "label", "shares": {0: 0.0, 1: 1.0}}},
    ],
)
def test_rows_that_are_left_out_teach_nothing(
    source: dict[str, Any], tiny_version: Path, labelled: Manifest
) -> None:
    check(tiny_version, labelled, **source)


def test_negatives_that_a_filter_leaves_and_that_weigh_something_are_counted(
    tiny_version: Path, labelled: Manifest, rows: dict[str, np.ndarray]
) -> None:
    """As weights, the label is 0 where the label is; the user's id is above 0."""
    zeros = int((rows["label"][rows["movie_id"] < 12] == 0).sum())
    few = [{"feature": "movie_id", "op": "<", "value": 12}]
    with pytest.raises(ConfigError, match=f"received: {zeros:,} rows"):
        check(tiny_version, labelled, filter=few)
    check(tiny_version, replace(labelled, keys=replace(labelled.keys, weight="label")))
    weighted = replace(labelled, keys=replace(labelled.keys, weight="user_id"))
    with pytest.raises(ConfigError, match="have label 0"):
        check(tiny_version, weighted)


@pytest.mark.parametrize("changes", [{"max": 5.0, "distinct": {"count": 5}}, {"max": 0.0}])
def test_labels_that_are_no_two_classes_are_left_alone(
    changes: dict[str, Any], tiny_version: Path, labelled: Manifest
) -> None:
    found = {**labelled.statistics["train"]["label"], **changes}
    check(tiny_version, replace(labelled, statistics={"train": {"label": found}}))
