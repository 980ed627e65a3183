from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.input.columns import Column, plan_columns
from training.input.rows import Rows
from training.input.tensors import BatchLayout
from training.input_errors import input_errors

DENSE = (
    FeatureSpec("number", "int64", "user"),
    FeatureSpec("padded", "float32", "user", shape=(None,), max_len=2),
)
LATE = (
    FeatureSpec("ragged", "int64", "user", shape=(None,)),
    FeatureSpec("words", "bytes", "user", shape=(None,), max_len=2, pad_value="-"),
    FeatureSpec("key", "bytes", "user"),
)


def rows_of(first: int, last: int, late: bool) -> Rows:
    numbers = np.arange(first, last)
    dense = {"number": numbers, "padded": np.stack([numbers, numbers], 1).astype(np.float32)}
    lists = {
        "ragged": pa.array([[n] * (n % 3) for n in numbers], pa.list_(pa.int64())),
        "words": pa.array([[b"w"] * (n % 4) for n in numbers], pa.list_(pa.binary())),
        "key": pa.array([b"%d" % n for n in numbers], pa.binary()),
    }
    return Rows(last - first, dense, lists if late else {})


def columns_of(manifest: Manifest, late: bool) -> tuple[Column, ...]:
    return plan_columns(manifest, (*DENSE, *LATE) if late else DENSE)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_parts_of_any_size_become_batches(late: bool, drop: bool, tiny_manifest: Manifest) -> None:
    layout, epochs = BatchLayout(columns_of(tiny_manifest, late), 4, drop), 2 if drop else 1
    assert layout.is_uniform != late

    def read() -> Iterator[Iterator[Rows]]:
        for _ in range(epochs):  # no batch lies across two
            yield iter([rows_of(0, 3, late), rows_of(3, 9, late), rows_of(9, 10, late)])

    batches = list(layout.build_dataset(read))
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


def test_the_size_of_a_batch_is_known(tiny_manifest: Manifest) -> None:
    for late in (False, True):
        layout = BatchLayout(columns_of(tiny_manifest, late), 4, True)
        spec = layout.build_dataset(lambda: iter([])).element_spec
        assert spec["number"] == tf.TensorSpec([4], tf.int64)
        assert spec["padded"] == tf.TensorSpec([4, 2], tf.float32)


def test_an_error_comes_through_as_what_it_was(tiny_manifest: Manifest) -> None:
    def read() -> Iterator[Iterator[Rows]]:
        raise InputDataError("a shard is broken", received="x")
        yield

    dataset = BatchLayout(columns_of(tiny_manifest, False), 4, True).build_dataset(read)
    with (
        pytest.raises(InputDataError, match="a shard is broken"),
        input_errors("there", tiny_manifest, "train"),
    ):
        list(dataset)
