from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from training.input.batches import build_eval_dataset, build_train_dataset
from training.reader.filters import hash_keys, hash_together
from training.reader.shards import InputCounts
from training.reader.training_data import InputOptions, SplitSource, count_rows, count_steps

HELD_OUT = {"validation": {"hash_of": "user_id", "share": 0.25}}
CASES = {
    "plain": {},
    "filter": {"filter": [{"feature": "history", "op": ">", "value": 3}]},
    "held out": HELD_OUT,
    "on_corrupt": {"on_corrupt": "skip_record"},
    "balanced": {"class_balance": {"feature": "label", "shares": {0: 0.5, 1: 0.5}}},
    "buckets": {"bucket_boundaries": [2, 5]},
}


def counting_source_of(
    version: Path, manifest: Manifest, held_out: bool = False, **config
) -> SplitSource:
    settings = InputConfig.model_validate({"batch_size": 16, "shuffle_buffer": 200, **config})
    return SplitSource(version, manifest, "train", settings, is_held_out=held_out)


@pytest.mark.parametrize("case", [*CASES, "mix"])
def test_an_epoch_has_as_many_batches_as_are_counted(
    case, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    mix = {"mix": [{"dataset": str(tiny_version), "weight": 0.3}], **HELD_OUT}
    source = counting_source_of(tiny_version, tiny_manifest, **CASES.get(case, mix))
    for epoch in (0, 1):
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, source.config, epoch=epoch, seed=3
        )
        assert sum(1 for _ in dataset) == count_steps(source)


def test_two_places_of_one_version_are_counted_apart(tmp_path: Path, tiny_version: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_version, copy)
    manifest = read_manifest(copy)
    (copy / "train" / "part-00001.tfrecord").unlink()
    found = [
        count_rows(counting_source_of(place, manifest, on_corrupt="skip_shard"))
        for place in (tiny_version, copy)
    ]
    assert found == [780, 585]


BASE = {"batch_size": 1, "shuffle_buffer": 300}


def column(dataset, name: str) -> np.ndarray:
    parts = [batch[name].numpy() for batch in dataset]
    return np.concatenate(parts) if parts else np.empty(0)


def train(version: Path, manifest: Manifest, config: InputConfig, name: str, **more) -> np.ndarray:
    dataset = build_train_dataset(
        version, manifest, config, epoch=0, seed=0, features=["user_id", "movie_id", "label"],
        options=InputOptions(**more),
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
    assert count_rows(SplitSource(tiny_version, tiny_manifest, "train", config)) == len(found)


def test_held_out_rows_are_the_others_and_keys_stay_together(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    held = {"hash_of": "user_id", "share": 0.3}
    config = InputConfig.model_validate({**BASE, "validation": held})
    kept = train(tiny_version, tiny_manifest, config, "user_id")
    other = column(
        build_eval_dataset(tiny_version, tiny_manifest, "train", 16, ["user_id"], held_out=config),
        "user_id",
    )
    assert len(kept) + len(other) == 780
    assert not set(kept.tolist()) & set(other.tolist())
    assert 0.15 < len(other) / 780 < 0.45
    with pytest.raises(ConfigError, match="held out"):
        build_eval_dataset(tiny_version, tiny_manifest, "train", 16, held_out=InputConfig())
    pairs = {"validation": {"hash_of": ["user_id", "movie_id"], "share": 0.3}}
    source = counting_source_of(tiny_version, tiny_manifest, True, **pairs)
    assert 0.2 < count_rows(source) / 780 < 0.4


def test_the_manifest_tells_the_steps_where_nothing_is_left_out(
    tiny_version: Path, tiny_manifest: Manifest, monkeypatch
) -> None:
    monkeypatch.setattr("training.reader.training_data.read_epoch", None)
    where, config = (tiny_version, tiny_manifest, "train"), InputConfig(batch_size=32)
    assert count_steps(SplitSource(*where, config)) == 24
    assert count_steps(SplitSource(*where, config, InputOptions(worker=(0, 2)))) == 24
    with pytest.raises(ConfigError, match="a multiple of 3"):
        count_steps(SplitSource(*where, config, InputOptions(worker=(0, 3))))
    with pytest.raises(InputDataError, match="780 rows"):
        count_steps(SplitSource(*where, InputConfig(batch_size=999)))


def test_what_a_filter_cannot_compare_is_refused(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    for item, error in (
        ({"feature": "movie", "value": 1}, InputDataError),
        ({"feature": "movie_id", "value": "x"}, ConfigError),
        ({"feature": "movie_id", "op": "in", "value": [3, 1.5]}, ConfigError),
        ({"feature": "movie_id", "op": "in", "value": [3, 2**63]}, ConfigError),
    ):
        config = InputConfig.model_validate({**BASE, "filter": [item]})
        with pytest.raises(error, match="movie"):
            train(tiny_version, tiny_manifest, config, "user_id")
    config = InputConfig.model_validate(
        {**BASE, "validation": {"hash_of": "history", "share": 0.5}}
    )
    with pytest.raises(ConfigError, match="one value per row"):
        train(tiny_version, tiny_manifest, config, "user_id")


def test_hashes_are_fixed_even_and_know_their_order() -> None:
    # SplitMix64's first outputs from the seeds 0 and 1 (the published reference generator).
    assert hash_keys(np.array([0, 1])).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    texts = hash_keys(np.array([b"a", b"b", None], object))
    assert len(set(texts.tolist())) == 3
    first, second = np.divmod(np.arange(40_000), 200)
    hashed = hash_together([first, second])
    assert len(set(hashed.tolist())) == 40_000
    for part in (hashed, hashed[first == second], hashed[first == 7]):
        share, rows = 0.25, len(part)
        assert abs((part / 2**64 < share).mean() - share) < 4 * np.sqrt(share * (1 - share) / rows)
    assert (hash_together([second, first]) != hashed)[first != second].all()
    np.testing.assert_array_equal(hash_together([first]), hash_keys(first))
