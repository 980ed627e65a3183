from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from conf.encoders import EncoderPlan
from conf.encoders.numbers import Normalize
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.training.input import InputConfig
from tests.training.number_features import add_numbers
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.input.batches import build_train_dataset
from training.reader.batch_plan import check_mixed_ids, find_mixed
from training.reader.rows import (
    LENGTH_COLUMN,
    DecodedRows,
    balance_classes,
    bucket_batches,
    mix_rows,
    regroup,
)


def rows(first: int, count: int) -> DecodedRows:
    values = np.arange(first, first + count)
    lists = pa.array([[int(value)] * (value % 3) for value in values], pa.list_(pa.int64()))
    return DecodedRows(count, {"v": values, "m": np.stack([values, values], 1)}, {"l": lists})


@given(
    sizes=st.lists(st.integers(0, 23), max_size=8),
    batch=st.integers(1, 9),
    times=st.integers(1, 3),
    drop=st.booleans(),
)
def test_regrouped_rows_are_the_same_in_whole_batches(sizes, batch, times, drop):
    starts = np.cumsum([0, *sizes])
    parts = [rows(int(start), size) for start, size in zip(starts, sizes, strict=False)]
    groups = list(regroup(iter(parts), batch, batch * times, drop))
    values = [value for group in groups for value in group.dense["v"].tolist()]
    total = sum(sizes)
    assert values == list(range(total - total % batch if drop else total))
    assert [r for group in groups for r in group.lists["l"].to_pylist()] == [
        [value] * (value % 3) for value in values
    ]
    assert all(group.count <= batch * times for group in groups)
    whole = groups if drop else groups[:-1]
    assert all(group.count % batch == 0 for group in whole)


def sampling_rows(values, **more) -> DecodedRows:
    values = np.asarray(values, np.int64)
    return DecodedRows(len(values), {"id": values, **more}, {})


def test_classes_get_their_shares_and_rare_rows_repeat_evenly():
    label = np.array([0] * 90 + [1] * 10, np.float32)
    drawn = balance_classes(sampling_rows(range(100), label=label), "label", {0: 0.5, 1: 0.5}, [1])
    assert drawn.count == 100
    assert drawn.dense["label"].sum() == 50
    assert np.bincount(drawn.dense["id"][drawn.dense["label"] == 1])[90:].tolist() == [5] * 10
    frequent = drawn.dense["id"][drawn.dense["label"] == 0]
    assert len(set(frequent.tolist())) == 50
    again = balance_classes(sampling_rows(range(100), label=label), "label", {0: 0.5, 1: 0.5}, [1])
    np.testing.assert_array_equal(drawn.dense["id"], again.dense["id"])


def test_a_class_that_is_not_there_leaves_its_share_and_an_unknown_one_is_refused():
    rows = sampling_rows(range(10), label=np.zeros(10, np.float32))
    assert balance_classes(rows, "label", {0: 0.5, 1: 0.5}, [1]).count == 10
    with pytest.raises(InputDataError, match="without a share"):
        balance_classes(rows, "label", {1: 0.5, 2: 0.5}, [1])


def test_batches_are_of_like_length_and_hold_each_row_once():
    rng = np.random.default_rng(0)
    buffers = []
    for start in (0, 100):
        length = rng.integers(0, 13, 100)
        lists = np.where(np.arange(12) < length[:, None], 1, 0)
        buffers.append(
            sampling_rows(range(start, start + 100), lists=lists, **{LENGTH_COLUMN: length})
        )
    batches = list(bucket_batches(iter(buffers), (3, 6), {"lists": 12}, 8, [0]))
    assert len(batches) == 200 // 8
    seen = np.concatenate([batch.dense["id"] for batch in batches])
    assert len(set(seen.tolist())) == 200
    for batch in batches:
        longest = batch.dense[LENGTH_COLUMN].max()
        width = 3 if longest <= 3 else 6 if longest <= 6 else 12
        assert batch.dense["lists"].shape == (8, width)
        np.testing.assert_array_equal(batch.dense["lists"].sum(axis=1), batch.dense[LENGTH_COLUMN])
    lengths = np.concatenate([rows.dense[LENGTH_COLUMN] for rows in buffers])
    for bound, low in ((3, -1), (6, 3)):
        narrow = sum(batch.dense["lists"].shape[1] == bound for batch in batches)
        assert narrow >= ((lengths <= bound) & (lengths > low)).sum() // 8


def test_sources_are_mixed_by_weight_and_begin_anew():
    passes = []

    def source(offset, size):
        def read(number):
            passes.append((offset, number))
            yield sampling_rows(np.arange(size) + offset)

        return read

    batches = list(mix_rows([source(0, 10_000), source(10_000, 7)], [0.75, 0.25], 50, 64, [3]))
    values = np.concatenate([batch.dense["id"] for batch in batches])
    first = values[values < 10_000]
    assert len(first) == len(set(first.tolist()))  # each once
    assert abs(len(first) / len(values) - 0.75) < 0.03
    assert max(number for offset, number in passes if offset) > 50
    with pytest.raises(InputDataError, match="no rows"):
        list(mix_rows([source(0, 0)], [1.0], 1, 4, [3]))


def config_of(dataset: Path, weight: float = 0.25, **config) -> InputConfig:
    mix = [{"dataset": str(dataset), "weight": weight}]
    return InputConfig.model_validate({"batch_size": 50, "mix": mix, **config})


def test_each_epoch_draws_the_other_dataset_in_another_order(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """By its users, in the order in which their rows come: batches mix them anew in any case."""
    other = write_tiny_dataset(tmp_path, "other", TinyConfig(seed=9, own_group=0.0))
    config = config_of(other, weight=0.5, batch_size=780)

    def drawn(epoch: int) -> list[tuple[int, ...]]:
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, config, epoch=epoch, seed=1,
            features=["user_id", "movie_id", "label"],
        )  # fmt: skip
        batch = next(iter(dataset))
        return sorted(zip(*(batch[n].numpy().tolist() for n in batch), strict=True))

    # Half of the rows of each dataset, which half is another one in each epoch.
    common = Counter(drawn(0)) & Counter(drawn(1))
    assert sum(common.values()) < 0.8 * 780


def test_other_features_are_refused(tmp_path: Path, tiny_manifest: Manifest) -> None:
    shorter = write_tiny_dataset(tmp_path, "shorter", TinyConfig(max_len=5))
    with pytest.raises(InputDataError, match=r"'history'[\s\S]*max_len 5[\s\S]*max_len 8"):
        find_mixed(config_of(shorter), tiny_manifest, ["user_id", "history"])
    with pytest.raises(UpstreamNotReadyError):
        find_mixed(config_of(tmp_path / "none"), tiny_manifest, ["label"])


NAMES = ["user_id", "history", "movie_id", "label"]


def check(version: Path, manifest: Manifest, other: Path, names: list[str] = NAMES) -> None:
    check_mixed_ids(version, manifest, [(other, read_manifest(other))], names)


def test_the_same_tokens_under_the_same_ids_pass(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    check(tiny_version, tiny_manifest, write_tiny_dataset(tmp_path, "again"))
    # Encoders of other columns may differ: of fewer events, the same users are numbered alike.
    other = write_tiny_dataset(tmp_path, "longer", TinyConfig(events_per_user=12))
    assert read_manifest(other).encoders_fingerprint != tiny_manifest.encoders_fingerprint
    check(tiny_version, tiny_manifest, other, ["user_id", "label"])


def test_other_tokens_under_as_many_ids_are_refused(
    tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    other = write_tiny_dataset(tmp_path, "other", TinyConfig(seed=9))
    sizes = [m.schema["movie_id"].vocabulary_size for m in (read_manifest(other), tiny_manifest)]
    assert sizes[0] == sizes[1]
    with pytest.raises(InputDataError, match=r"'(history|movie_id)'") as caught:
        check(tiny_version, tiny_manifest, other)
    assert "'other'" in caught.value.render()
    check(tiny_version, tiny_manifest, other, ["user_id"])


def test_numbers_of_another_scale_are_refused(tmp_path: Path) -> None:
    one, two = (write_tiny_dataset(tmp_path, name) for name in ("one", "two"))
    add_numbers(one)
    add_numbers(two)
    check(one, read_manifest(one), two, ["price", "plain"])
    file = two / "encoders" / "encoders.json"
    plan = EncoderPlan.from_json(json.loads(file.read_text()))
    scaled = Normalize(center=7.0, factor=0.5)
    columns = tuple(
        replace(c, operation=scaled) if c.feature == "price" else c for c in plan.columns
    )
    plan = replace(plan, columns=columns)
    file.write_text(plan.dumps())
    manifest = replace(read_manifest(two), encoders_fingerprint=plan.fingerprint)
    (two / "manifest.json").write_text(manifest.dumps())
    check(one, read_manifest(one), two, ["user_id", "plain"])
    with pytest.raises(InputDataError, match="'price' mean something else"):
        check(one, read_manifest(one), two, ["price"])
