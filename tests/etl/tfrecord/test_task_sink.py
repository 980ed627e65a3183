"""One task's files: partitions, a bounded number of open files, lowering in the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from etl.tfrecord.framing import read_records
from etl.tfrecord.options import WriteOptions
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.rolling import ShardLimits
from etl.tfrecord.task_sink import TaskSink
from tests.growth import growth


def run(root: Path, batches: list[pa.RecordBatch], open_files: int = 64, **options) -> list:
    sink = TaskSink(root, "part-0", WriteOptions(str(root), **options), max_open_files=open_files)
    return list(sink.write_all(iter(batches)))


def test_few_open_files_lose_no_row(tmp_path: Path) -> None:
    batches = [pa.record_batch({"a": [k] * 6, "p": [0, 1, 2, 3, 0, 1]}) for k in range(3)]
    shards = run(tmp_path, batches, open_files=2, partition_by=("p",))
    assert sum(item.shard.info.rows for item in shards) == 18
    assert all(item.shard.info.rows for item in shards)
    by_value: dict[str, list[str]] = {}
    for item in shards:
        by_value.setdefault(item.partition_values["p"], []).append(item.shard.info.path)
        assert len(list(read_records(tmp_path / item.shard.info.path))) == item.shard.info.rows
    assert by_value["2"] == [f"p=2/part-0-c00{k}.tfrecord" for k in range(3)]
    assert set(by_value) == {"0", "1", "2", "3"}


def test_never_more_files_open_than_allowed(tmp_path: Path) -> None:
    sink = TaskSink(
        tmp_path, "x", WriteOptions(str(tmp_path), partition_by=("p",)), max_open_files=3
    )
    most = 0

    def batches():
        nonlocal most
        for k in range(20):
            yield pa.record_batch({"a": [k, k], "p": [k, k // 2]})
            most = max(most, len(list(tmp_path.rglob("*.tmp"))))

    sink.write_all(batches())
    assert most == 3
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "part-0-c000.tfrecord"),
        ({"deterministic_names": True}, "part-0.tfrecord"),
        ({"deterministic_names": True, "limits": ShardLimits(rows=9)}, "part-0-c000.tfrecord"),
        ({"compression": "GZIP"}, "part-0-c000.tfrecord.gz"),
    ],
)
def test_names(tmp_path: Path, options, name: str) -> None:
    (item,) = run(tmp_path, [pa.record_batch({"a": [1]})], **options)
    assert item.shard.info.path == name


def test_an_error_leaves_no_open_file(tmp_path: Path) -> None:
    good = pa.record_batch({"x": [1.5, 2.5], "p": [0, 1]})
    bad = pa.record_batch({"x": [1e300], "p": [0]})
    with pytest.raises(InputDataError):
        run(tmp_path, [good, bad], partition_by=("p",))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_policies_apply_in_the_task(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array([1.5, None])})
    policy = LoweringOptions(columns={"x": ColumnPolicy(nulls="error")})
    with pytest.raises(InputDataError, match="x"):
        run(tmp_path, [batch], lowering=policy)


def test_planning_time_grows_with_the_columns_not_with_their_square(tmp_path: Path) -> None:
    def prepare(columns: int) -> Callable[[], Any]:
        batch = pa.record_batch({f"c{k}": [1] for k in range(columns)})
        sink = TaskSink(tmp_path, "part-0", WriteOptions(str(tmp_path)), batch.schema)
        return lambda: sink._plan_records(batch.schema)

    assert growth(prepare, 1000, 16_000) < 80  # 16 where it is linear, 256 where it is quadratic
