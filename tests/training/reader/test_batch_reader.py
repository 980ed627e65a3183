"""`open_batches`: the batches of `open_dataset` as arrays, by rank, from any batch on."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError, TooFewRowsError
from conf.manifest import MANIFEST_FILE, Manifest, ShardInfo
from conf.schema import PackedSlot
from conf.storage.atomic_output import write_text_atomic
from etl.tfrecord.codec.crc32c import crc32c
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.types.features import WireFeature
from tests.machine import IS_EXHAUSTIVE
from tests.tfrecord_files import read_file
from tests.training.sequence_dataset import write_sequences
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training import open_batches, open_dataset
from training.reader import batch_plan, shuffle_buffer
from training.reader.batch_reader import Arrays, BatchReader
from training.reader.rows import RaggedList
from training.reader.shards import decode_records

ROOT = Path(__file__).parents[3]
ROWS = 780
BALANCE = {"feature": "label", "shares": {0: 0.3, 1: 0.7}}
HELD_OUT = {"hash_of": "user_id", "share": 0.3}
# What makes batches in other ways, and so is resumed and shared out in other ways.
WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "dropped": {"drop_remainder": True},
    "few at a time": {"interleave_shards": 2},
    "ordered": {"split": "test"},
    "filtered": {"filter": [{"feature": "movie_id", "op": ">", "value": 9}]},
    "others held out": {"validation": HELD_OUT},
    "held out": {"validation": HELD_OUT, "held_out": True, "shuffle": True},
    "by class": {"class_balance": BALANCE},
    "by length": {"bucket_boundaries": [2, 5]},
    "salvaged": {"on_corrupt": "skip_record"},
    "a buffer of a batch": {"shuffle_buffer": 1},
    "one buffer": {"shuffle_buffer": 10_000},
    "mixed": {},  # with itself
}


def hash_batch(batch: Arrays) -> dict[str, Any]:
    """All that a batch is: types, shapes and every bit."""
    return {
        name: [hash_array(part) for part in (value if isinstance(value, RaggedList) else [value])]
        for name, value in batch.items()
    }


def hash_array(array: np.ndarray) -> tuple[str, tuple[int, ...], Any]:
    content = array.tolist() if array.dtype == object else array.tobytes()
    return str(array.dtype), array.shape, content


def take_array(value: tf.Tensor | tf.RaggedTensor) -> np.ndarray | RaggedList:
    if isinstance(value, tf.RaggedTensor):
        return RaggedList(value.values.numpy(), value.row_splits.numpy())
    return value.numpy()


def read_dataset(dataset: tf.data.Dataset, label: str = "label") -> Iterator[Arrays]:
    """The batches of `open_dataset` with all features in one dictionary."""
    for inputs, *targets in (e if isinstance(e, tuple) else (e,) for e in dataset):
        named = dict(zip((label, "weight"), targets, strict=False))
        yield {name: take_array(value) for name, value in {**inputs, **named}.items()}


def read_epochs(reader: BatchReader, count: int) -> list[list[dict[str, Any]]]:
    return [[hash_batch(batch) for batch in reader] for _ in range(count)]


def options_of(version: Path, way: str) -> dict[str, Any]:
    mix = {"mix": [{"dataset": str(version), "weight": 0.4}]} if way == "mixed" else {}
    return {"seed": 7, "shuffle_buffer": 200, **WAYS[way], **mix}


def open_way(version: Path, way: str, batch_size: int = 48, **more: Any) -> BatchReader:
    return open_batches(version, batch_size, **{**options_of(version, way), **more})


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with several shards."""
    folder = tmp_path_factory.mktemp("shards")
    return write_tiny_dataset(folder, config=TinyConfig(train_shards=3))


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_those_of_open_dataset(way: str, version: Path) -> None:
    dataset = open_dataset(version, 48, **options_of(version, way))
    reader = open_way(version, way)
    expected = [[hash_batch(batch) for batch in read_dataset(dataset)] for _ in range(2)]
    assert read_epochs(reader, 2) == expected
    assert len(expected[0]) > 1
    if dataset.cardinality() >= 0:
        assert reader.batches_per_epoch == len(expected[0])
    else:
        assert reader.batches_per_epoch is None


def pack_version(version: Path, target: Path) -> Path:
    """Copies an uncompressed version, its int64 scalars side by side in one list."""
    shutil.copytree(version, target)
    manifest = read_manifest(version)
    specs = [s for s in manifest.schema.features if s.dtype == "int64" and not s.is_list]
    wire = [WireFeature(s.name, s.dtype, s.is_list) for s in manifest.schema.features]

    def pack(shard: ShardInfo) -> ShardInfo:
        table = read_file(version / shard.path, wire)
        columns = [table[s.name].to_numpy() for s in specs]
        values = pa.array(np.stack(columns, axis=1).reshape(-1))
        packed = pa.FixedSizeListArray.from_arrays(values, len(specs))
        (batch,) = table.drop([s.name for s in specs]).append_column("all", packed).to_batches()
        data = build_encoder(batch.schema).encode(batch)
        (target / shard.path).write_bytes(data)
        return replace(shard, bytes=data.size, crc32c=f"{crc32c(data):08x}")

    splits = tuple(replace(s, shards=tuple(map(pack, s.shards))) for s in manifest.splits)
    slots = tuple(PackedSlot(s.name, "all", place) for place, s in enumerate(specs))
    changed = replace(manifest, splits=splits, slots=slots)
    write_text_atomic(target / MANIFEST_FILE, changed.dumps())
    return target


@pytest.mark.parametrize("way", ["shuffled", "filtered", "by length"])
def test_scalars_that_share_a_list_give_the_same_batches(
    way: str, version: Path, tmp_path: Path
) -> None:
    packed = pack_version(version, tmp_path / version.name)
    assert read_epochs(open_way(packed, way), 1) == read_epochs(open_way(version, way), 1)


def test_lists_come_as_values_and_offsets_or_padded(
    tmp_path: Path, tiny_manifest: Manifest
) -> None:
    write_sequences(tmp_path, tiny_manifest)
    dataset = open_dataset(tmp_path, 8, seed=1)
    batches = list(open_batches(tmp_path, 8, seed=1))
    assert [hash_batch(batch) for batch in batches] == [
        hash_batch(batch) for batch in read_dataset(dataset)
    ]
    whole = list(open_batches(tmp_path, 8, seed=1, ragged=["items"]))
    for batch, other in zip(batches, whole, strict=True):
        items, prices = other["items"], batch["prices"]
        assert isinstance(items, RaggedList)
        assert isinstance(prices, RaggedList)
        np.testing.assert_array_equal(items.pad(3), batch["items"])
        assert items.pad().shape[1] == np.diff(items.offsets).max()
        lengths = np.diff(prices.offsets)
        np.testing.assert_array_equal(prices.values, np.repeat(prices.pad(1, -1)[:, 0], lengths))
        prices.values[:] = 0  # belongs to the caller
        assert batch["times"].shape == (8, 4)


def test_ids_with_weights_are_two_lists(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_plan, "find_sparse_pairs", lambda *_: {"history": "genres"})
    padded = next(iter(open_batches(version, 48)))
    batch = next(iter(open_batches(version, 48, sparse=True)))
    for name in ("history", "genres"):
        lists, dense = batch[name], padded[name]
        assert isinstance(lists, RaggedList)
        assert isinstance(dense, np.ndarray)
        np.testing.assert_array_equal(lists.pad(dense.shape[1]), dense)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_and_workers_share_the_batches(way: str, version: Path) -> None:
    """Rows of all ranks, of batches of their workers in turn, are the batches of one reader."""
    whole = list(open_way(version, way))
    for ranks, workers in ((2, 1), (3, 2), (1, 3)):
        readers = [open_way(version, way, rank=(rank, ranks)) for rank in range(ranks)]
        for reader in readers:
            reader.restore({**reader.state(), "batch": 1})
        parts = [[r.read_part(w, workers) for w in range(workers)] for r in readers]
        for number, expected in enumerate(whole[1:]):
            if len(expected["movie_id"]) < ranks:
                break
            found = [hash_batch(next(part[number % workers])) for part in parts]
            joined = [split_rows(expected, rank, ranks) for rank in range(ranks)]
            assert found == [hash_batch(batch) for batch in joined]
        assert all(next(turn, None) is None for part in parts for turn in part)


def split_rows(batch: Arrays, rank: int, ranks: int) -> Arrays:
    rows = len(batch["movie_id"])
    first, last = rows * rank // ranks, rows * (rank + 1) // ranks
    return {name: value[first:last] for name, value in batch.items()}


def test_neither_rows_of_other_ranks_nor_those_before_the_position_are_decoded(
    version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def decode(decoder: Any, block: Any, *others: Any) -> Any:
        decoded.append(len(block.index))
        return decode_records(decoder, block, *others)

    monkeypatch.setattr(shuffle_buffer, "decode_records", decode)
    rows = sum(len(b["label"]) for b in open_batches(version, 39, rank=(1, 3)))
    assert rows == sum(decoded) == ROWS // 3
    decoded.clear()
    reader = open_way(version, "shuffled", 39)
    reader.restore({**reader.state(), "batch": 11})
    assert len(list(reader)) == 9
    assert sum(decoded) == 9 * 39


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_resumes_exactly(way: str, version: Path) -> None:
    """A state of two numbers and four that stand for the rest, through JSON, at any batch."""
    reader, seen, states = open_way(version, way), [], []
    for _ in range(2):
        for batch in reader:
            seen.append(hash_batch(batch))
            states.append(json.dumps(reader.state()))
    every = IS_EXHAUSTIVE and way == "shuffled"
    some = (1, len(seen) // 2, len(seen) // 2 + 1, len(seen) - 1)
    for done in range(1, len(seen)) if every else some:
        again = open_way(version, way)
        again.restore(json.loads(states[done - 1]))
        found = [hash_batch(batch) for _ in range(2) for batch in again]
        assert found[: len(seen) - done] == seen[done:]


def test_it_resumes_with_another_number_of_ranks(version: Path) -> None:
    """Ranks 1, 2, 3, 1: each global batch once, in the order of one rank."""
    reader = open_way(version, "shuffled")
    expected = [batch["movie_id"] for _ in range(2) for batch in reader]
    state, found = open_way(version, "shuffled").state(), []
    for ranks, batches in ((1, 5), (2, 7), (3, 9), (1, 20)):
        readers = [open_way(version, "shuffled", rank=(rank, ranks)) for rank in range(ranks)]
        for one in readers:
            one.restore(state)
        streams = [itertools.chain.from_iterable(itertools.repeat(one)) for one in readers]
        for _ in range(min(batches, len(expected) - len(found))):
            found.append(np.concatenate([next(stream)["movie_id"] for stream in streams]))
        states = [one.state() for one in readers]
        assert all(one == states[0] for one in states)
        state = states[0]
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_of_a_loader_are_counted_by_the_main_process(version: Path) -> None:
    reader = open_way(version, "shuffled")
    expected = read_epochs(copy.deepcopy(reader), 2)
    workers = [pickle.loads(pickle.dumps(reader)) for _ in range(2)]
    for epoch in range(2):
        # Workers that stay for the next epoch go on by themselves.
        parts = [worker.read_part(number, 2) for number, worker in enumerate(workers)]
        turns = (b for pair in itertools.zip_longest(*parts) for b in pair if b is not None)
        found = []
        for batch in reader.track(turns):
            found.append(hash_batch(batch))
            assert (reader.epoch, reader.batch) == (epoch, len(found))
        assert found == expected[epoch]
    assert (reader.epoch, reader.batch) == (2, 0)


def test_a_thread_that_reads_ahead_does_not_move_the_reader(version: Path) -> None:
    reader = open_way(version, "shuffled")
    part, ahead, places = reader.read_part(), [], []

    def take() -> Iterator[Arrays]:
        yield next(part)
        yield from ahead

    for _ in reader.track(take()):
        ahead += part  # Meanwhile the thread has come to the end of the epoch.
        places.append((reader.epoch, reader.batch))
    assert places == [(0, number) for number in range(1, len(ahead) + 2)]
    assert (reader.epoch, reader.batch) == (1, 0)


def test_a_state_of_another_version_is_refused(version: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(version, tmp_path / "copy"))
    state = open_batches(version, 48).state()
    open_batches(copy, 48).restore(state)
    own = replace(read_manifest(version), dataset_version="2")
    write_text_atomic(copy / MANIFEST_FILE, own.dumps())
    with pytest.raises(ConfigError, match="another version"):
        open_batches(copy, 48).restore(state)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 8}, "seed"),
        ({"batch_size": 24}, "batch_size"),
        ({"validation": HELD_OUT}, "rows"),
        ({"shuffle_buffer": 100}, "rows"),
        ({"shuffle": False}, "rows"),
        ({"split": "test", "shuffle": True}, "version"),
    ],
)
def test_a_state_of_another_reader_is_refused(
    change: dict[str, Any], what: str, version: Path
) -> None:
    state = open_way(version, "shuffled").state()
    for ranks in (1, 2):
        other = open_way(version, "shuffled", **{"rank": (0, ranks), **change})
        with pytest.raises(ConfigError, match=f"of another {what}"):
            other.restore(state)
    # What changes no row changes no state.
    open_way(version, "shuffled", features=["label"], rank=(1, 2)).restore(state)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        *(({"rank": rank}, ConfigError) for rank in ((2, 2), (-1, 2), (0, 0), (0, 3))),
        ({"shufle_buffer": 5}, ConfigError),
        ({"batch_size": 0}, ConfigError),
        ({"shuffle": False, "sparse": True}, ConfigError),
        ({"split": "test", "rank": (0, 64), "batch_size": 64}, TooFewRowsError),
        ({"held_out": True}, ConfigError),
        ({"split": "test", "held_out": True, "validation": HELD_OUT}, ConfigError),
        ({"split": "test", "class_balance": BALANCE}, ConfigError),
        ({"features": ["movie"]}, InputDataError),
        ({"ragged": ["movie"]}, InputDataError),
        ({"batch_size": 999, "drop_remainder": True}, TooFewRowsError),
    ],
)
def test_refuses_what_cannot_be_read(
    arguments: dict[str, Any], error: type[Exception], version: Path
) -> None:
    with pytest.raises(error):
        open_batches(version, **{"batch_size": 8, **arguments})


def test_a_batch_without_a_row_for_each_rank_is_not_counted(version: Path) -> None:
    """Sixty rows: a batch of 56, and four rows that seven ranks cannot share."""
    for rank in range(7):
        reader = open_batches(version, 56, "test", rank=(rank, 7))
        assert reader.batches_per_epoch == len(list(reader)) == 1
    # Two ranks stand behind the second batch: all that seven ranks have is behind them.
    reader.restore({**open_batches(version, 56, "test", rank=(0, 2)).state(), "batch": 2})
    assert list(reader) == []
    few = [{"feature": "movie_id", "op": "<", "value": 0}]
    for options in ({"filter": few}, {"filter": few, "rank": (1, 2)}):
        reader = open_batches(version, 8, **options)
        assert reader.batches_per_epoch is None
        with pytest.raises(TooFewRowsError):
            next(iter(reader))


def test_damage_is_named_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = write_tiny_dataset(tmp_path)
    shard = damaged / "train" / "part-00001.tfrecord"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    with pytest.raises(InputDataError, match=r"part-00001") as found:
        list(open_batches(damaged, 32))
    assert "in split 'train'" in found.value.__notes__[0]
    with caplog.at_level(logging.WARNING):
        rows = sum(len(b["label"]) for b in open_batches(damaged, 32, on_corrupt="skip_record"))
    assert ROWS - 5 < rows < ROWS
    assert "split 'train', epoch 0: 1 bad record(s) skipped" in caplog.text


READ = """
import sys
from training import open_batches
reader = open_batches(sys.argv[1], 48, filter=[{"feature": "label", "value": 1}], rank=(0, 2))
assert sum(len(batch["movie_id"]) for batch in reader) > 48
reader.restore(reader.state())
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops & {"tensorflow", "keras", "pyspark", "py4j", "jobs"}))
"""


def test_reading_loads_neither_tensorflow_nor_spark(version: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(version)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
