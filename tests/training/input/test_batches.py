from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.encoders.bags import Weights
from conf.manifest import Manifest
from conf.schema import FeatureSchema, FeatureSpec
from conf.training.input import InputConfig
from tests.training.tiny_dataset import TinyConfig, one_feature, write_tiny_dataset
from training.input.batches import (
    build_dataset,
    build_eval_dataset,
    build_sparse,
    build_train_dataset,
)
from training.reader import batch_plan as sparse_module
from training.reader.batch_plan import BatchShape, find_sparse_pairs
from training.reader.feature_columns import FeatureColumn, plan_columns
from training.reader.rows import DecodedRows

CONFIG = InputConfig(batch_size=32, shuffle_buffer=400, interleave_shards=2)


def read_rows(dataset: tf.data.Dataset, names: tuple[str, ...]) -> list[tuple]:
    rows = []
    for batch in dataset:
        columns = [batch[name].numpy().tolist() for name in names]
        rows += [tuple(map(repr, row)) for row in zip(*columns, strict=True)]
    return rows


def test_an_epoch_is_the_split_less_the_tail(tiny_version: Path, tiny_manifest: Manifest) -> None:
    stored = Counter(
        read_rows(
            build_eval_dataset(tiny_version, tiny_manifest, "train", 64),
            ("user_id", "movie_id", "history"),
        )
    )
    dataset = build_train_dataset(tiny_version, tiny_manifest, CONFIG, epoch=0, seed=1)
    rows = read_rows(dataset, ("user_id", "movie_id", "history"))
    total = sum(stored.values())
    assert total == tiny_manifest.split("train").rows
    assert len(rows) == total - total % CONFIG.batch_size
    assert not Counter(rows) - stored  # each row at most as often as it is stored


def test_evaluation_keeps_order_and_tail_and_raggedness(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    dataset = build_eval_dataset(
        tiny_version, tiny_manifest, "test", 25, ["user_id", "seen", "genres"], ragged=["genres"]
    )
    batches = list(dataset)
    assert [int(batch["user_id"].shape[0]) for batch in batches] == [25, 25, 10]
    assert isinstance(batches[0]["seen"], tf.RaggedTensor)
    assert isinstance(batches[0]["genres"], tf.RaggedTensor)
    again = list(build_eval_dataset(tiny_version, tiny_manifest, "test", 60, ["user_id"]))
    together = np.concatenate([batch["user_id"].numpy() for batch in batches])
    np.testing.assert_array_equal(together, again[0]["user_id"].numpy())


def test_one_sided_splits_hold_their_side(tiny_version: Path, tiny_manifest: Manifest) -> None:
    catalog, users = (
        next(iter(build_eval_dataset(tiny_version, tiny_manifest, split, 100)))
        for split in ("catalog", "users")
    )
    assert set(catalog) == {"movie_id", "genres"}
    assert catalog["movie_id"].numpy().tolist() == sorted(
        catalog["movie_id"].numpy(), key=lambda i: (i % 2, i)
    )
    assert set(users) == {"user_id", "gender", "history", "seen"}
    assert users["user_id"].shape == (60,)


def test_an_empty_split_gives_no_batch(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=TinyConfig(validation=False))
    dataset = build_eval_dataset(version, read_manifest(version), "validation", 8)
    assert list(dataset) == []
    assert dataset.element_spec["user_id"].dtype == tf.int64


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FeatureSpec("f", "int64", "user", vocabulary_size=9), [5, 1]),
        (FeatureSpec("f", "float32", "user", pad_value=-1.5), [5.0, -1.5]),
        (FeatureSpec("f", "int64", "user", pad_value=7), [5, 7]),
        (FeatureSpec("f", "int64", "user", shape=(2,), vocabulary_size=9), [[5, 6], [0, 0]]),
        (FeatureSpec("f", "float32", "user", shape=(2,), pad_value=0.5), [[5.0, 6.0], [0.5, 0.5]]),
        (FeatureSpec("f", "int64", "user", (None,), 3, vocabulary_size=9), [[5, 6, 0], [0, 0, 0]]),
        (FeatureSpec("f", "float32", "user", (None,), 3), [[5.0, 6.0, 0.0], [0.0, 0.0, 0.0]]),
        (FeatureSpec("f", "float32", "user", (None,), 1, pad_value=0.5), [[5.0], [0.5]]),
    ],
)
def test_an_absent_value(
    tmp_path: Path, tiny_manifest: Manifest, spec: FeatureSpec, expected: list
) -> None:
    present = {"f": [5, 6] if spec.is_list else 5}
    manifest = one_feature(tmp_path, tiny_manifest, spec, [present, {}])
    batch = next(iter(build_eval_dataset(tmp_path, manifest, "test", 2)))
    assert batch["f"].numpy().tolist() == expected


def test_statistics_bound_a_list_without_max_len(
    tiny_version: Path, tiny_manifest: Manifest
) -> None:
    features = tuple(
        replace(spec, max_len=None) if spec.name == "genres" else spec
        for spec in tiny_manifest.schema.features
    )
    manifest = replace(tiny_manifest, schema=FeatureSchema(features))
    unknown = build_train_dataset(tiny_version, manifest, CONFIG, epoch=0, seed=0)
    assert isinstance(unknown.element_spec["genres"], tf.RaggedTensorSpec)
    manifest = replace(manifest, statistics={"train": {"genres": {"length": {"max": 2}}}})
    known = build_train_dataset(tiny_version, manifest, CONFIG, epoch=0, seed=0)
    assert known.element_spec["genres"] == tf.TensorSpec([32, 2], tf.int64)
    assert int(tf.reduce_max(next(iter(known))["genres"][:, 1])) > 0


DENSE = (
    FeatureSpec("number", "int64", "user"),
    FeatureSpec("padded", "float32", "user", shape=(None,), max_len=2),
)
LATE = (
    FeatureSpec("ragged", "int64", "user", shape=(None,)),
    FeatureSpec("words", "bytes", "user", shape=(None,), max_len=2, pad_value="-"),
    FeatureSpec("key", "bytes", "user"),
)


def rows_of(first: int, last: int, late: bool) -> DecodedRows:
    numbers = np.arange(first, last)
    dense = {"number": numbers, "padded": np.stack([numbers, numbers], 1).astype(np.float32)}
    lists = {
        "ragged": pa.array([[n] * (n % 3) for n in numbers], pa.list_(pa.int64())),
        "words": pa.array([[b"w"] * (n % 4) for n in numbers], pa.list_(pa.binary())),
        "key": pa.array([b"%d" % n for n in numbers], pa.binary()),
    }
    return DecodedRows(last - first, dense, lists if late else {})


def columns_of(manifest: Manifest, late: bool) -> tuple[FeatureColumn, ...]:
    return plan_columns(manifest, (*DENSE, *LATE) if late else DENSE)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_parts_of_any_size_become_batches(late: bool, drop: bool, tiny_manifest: Manifest) -> None:
    shape, epochs = BatchShape(columns_of(tiny_manifest, late), 4, drop), 2 if drop else 1
    assert shape.is_uniform != late

    def read() -> Iterator[DecodedRows]:
        yield from (rows_of(0, 3, late), rows_of(3, 9, late), rows_of(9, 10, late))

    batches = list(build_dataset(shape, read).repeat(epochs))  # no batch lies across two
    numbers = [batch["number"].numpy().tolist() for batch in batches]
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]]
    tail = [] if drop else [[8, 9]]
    assert numbers == (whole + tail) * epochs
    if late:
        batch = batches[1]
        assert batch["ragged"].to_list() == [[n] * (n % 3) for n in (4, 5, 6, 7)]
        assert batch["words"].numpy().tolist()[3] == [b"w", b"w"]
        assert batch["words"].numpy().tolist()[0] == [b"-", b"-"]
        assert batch["key"].numpy().tolist() == [b"4", b"5", b"6", b"7"]


def ragged(rows: list, dtype: tf.DType) -> tf.RaggedTensor:
    return tf.ragged.constant(rows, dtype, row_splits_dtype=tf.int64)


def test_as_many_weights_as_ids_are_needed() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many weights as ids"):
        build_sparse(ragged([[1, 2], [3]], tf.int64), ragged([[1.0], [2.0, 3.0]], tf.float32), 9)


def test_weights_belong_to_the_ids_of_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(feature: str, operation: object, *inputs: str) -> SimpleNamespace:
        names = tuple(SimpleNamespace(name=name) for name in inputs)
        return SimpleNamespace(feature=feature, column=feature, operation=operation, inputs=names)

    weights = Weights.__new__(Weights)
    columns = [
        column("ids", None, "a"),
        column("others", None, "b"),
        column("values", weights, "w", "a"),
    ]
    spec = SimpleNamespace(vocabulary_size=9)
    names = ["ids", "others", "values"]

    class Schema(dict):
        names = ["ids", "others", "values"]  # noqa: RUF012

    monkeypatch.setattr(sparse_module, "read_plan", lambda *_: SimpleNamespace(columns=columns))
    manifest = SimpleNamespace(schema=Schema(dict.fromkeys(names, spec)))
    assert find_sparse_pairs(None, manifest) == {"ids": "values"}  # type: ignore[arg-type]
