from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training import InputConfig
from training.input import (
    InputCounts,
    ReadOptions,
    Source,
    build_eval_dataset,
    build_held_out_dataset,
    build_train_dataset,
    count_rows,
    count_steps,
)
from training.input.filters import hash_keys

BASE = {"batch_size": 1, "shuffle_buffer": 300}


def column(dataset, name: str) -> np.ndarray:
    parts = [batch[name].numpy() for batch in dataset]
    return np.concatenate(parts) if parts else np.empty(0)


def train(version: Path, manifest: Manifest, config: InputConfig, name: str, **more) -> np.ndarray:
    dataset = build_train_dataset(
        version, manifest, config, epoch=0, seed=0, features=["user_id", "movie_id", "label"],
        options=ReadOptions(**more),
    )  # fmt: skip
    return column(dataset, name)


@pytest.mark.parametrize(
    ("op", "value", "keep"),
    [
        ("==", 3, lambda v: v == 3),
        ("!=", 3, lambda v: v != 3),
        ("<", 5, lambda v: v < 5),
        (">=", 5.5, lambda v: v >= 5.5),
        ("in", [2, 4], lambda v: np.isin(v, [2, 4])),
        ("not_in", [2, 4], lambda v: ~np.isin(v, [2, 4])),
    ],
)
def test_rows_are_kept_by_value(
    op, value, keep, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    item = {"feature": "movie_id", "op": op, "value": value}
    config = InputConfig.model_validate({**BASE, "filter": [item]})
    stored = column(build_eval_dataset(tiny_version, tiny_manifest, "train", 99), "movie_id")
    counts = InputCounts()
    found = train(tiny_version, tiny_manifest, config, "movie_id", counts=counts)
    np.testing.assert_array_equal(np.sort(found), np.sort(stored[keep(stored)]))
    assert counts.filtered == len(stored) - len(found)
    assert count_rows(Source(tiny_version, tiny_manifest, "train", config)) == len(found)


def test_of_a_list_the_length_is_compared(tiny_version: Path, tiny_manifest: Manifest) -> None:
    item = {"feature": "history", "op": "==", "value": 0}
    config = InputConfig.model_validate({**BASE, "filter": [item]})
    # Each user has one event without a history.
    assert len(set(train(tiny_version, tiny_manifest, config, "user_id").tolist())) == 60


def test_held_out_rows_are_the_others_and_keys_stay_together(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    held = {"hash_of": "user_id", "share": 0.3}
    config = InputConfig.model_validate({**BASE, "validation": held})
    kept = train(tiny_version, tiny_manifest, config, "user_id")
    other = column(
        build_held_out_dataset(tiny_version, tiny_manifest, config, 16, ["user_id"]), "user_id"
    )
    assert len(kept) + len(other) == 780
    assert not set(kept.tolist()) & set(other.tolist())
    assert 0.15 < len(other) / 780 < 0.45
    with pytest.raises(ConfigError, match="held out"):
        build_held_out_dataset(tiny_version, tiny_manifest, InputConfig(), 16)


def test_hashes_are_fixed_and_even() -> None:
    # SplitMix64's first outputs from the seeds 0 and 1 (the published reference generator).
    assert hash_keys(np.array([0, 1])).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    shares = hash_keys(np.arange(100_000)) / 2**64
    assert abs((shares < 0.1).mean() - 0.1) < 0.005
    texts = hash_keys(np.array([b"a", b"b", None], object))
    assert len(set(texts.tolist())) == 3


def test_steps_are_counted_once_and_kept_beside_the_run(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    item = {"feature": "movie_id", "op": "<", "value": 9}
    config = InputConfig.model_validate({"batch_size": 32, "filter": [item]})
    source = Source(tiny_version, tiny_manifest, "train", config)
    steps = count_steps(source, tmp_path / "counts.json")
    dataset = build_train_dataset(tiny_version, tiny_manifest, config, epoch=0, seed=0)
    assert len(list(dataset)) == steps
    monkeypatch.setattr("training.input.counting._COUNTED", {})
    monkeypatch.setattr("training.input.counting.read_epoch", None)  # nothing is read again
    assert count_steps(source, tmp_path / "counts.json") == steps


def test_the_manifest_tells_the_steps_where_nothing_is_left_out(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    monkeypatch.setattr("training.input.counting.read_epoch", None)
    for change, steps in (({}, 24), ({"take": 100}, 3)):
        config = InputConfig.model_validate({"batch_size": 32, **change})
        assert count_steps(Source(tiny_version, tiny_manifest, "train", config)) == steps
    config = InputConfig(batch_size=32)
    options = ReadOptions(worker=(0, 2))
    assert count_steps(Source(tiny_version, tiny_manifest, "train", config, options)) == 24


def test_what_a_filter_cannot_compare_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    for item, error in (
        ({"feature": "movie", "value": 1}, InputDataError),
        ({"feature": "movie_id", "value": "x"}, ConfigError),
    ):
        config = InputConfig.model_validate({**BASE, "filter": [item]})
        with pytest.raises(error, match="movie"):
            train(tiny_version, tiny_manifest, config, "user_id")
    config = InputConfig.model_validate(
        {**BASE, "validation": {"hash_of": "history", "share": 0.5}}
    )
    with pytest.raises(ConfigError, match="one value per row"):
        train(tiny_version, tiny_manifest, config, "user_id")
