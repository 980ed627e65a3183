"""Splits cover every byte once and begin at records, wherever the offsets come from."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etl.tfrecord import framing_kernels, splits
from etl.tfrecord.input_files import DataFile
from etl.tfrecord.splits import plan_splits

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _cheap_files(monkeypatch) -> None:
    monkeypatch.setattr(splits, "OPEN_COST_BYTES", 0)


def write(path: Path, data: bytes, offsets: tuple[int, ...] | None = None) -> DataFile:
    path.write_bytes(data)
    return DataFile(str(path), len(data), ("p",), offsets)


def plan(*files: DataFile, size: int, least: int = 1, compression="auto"):
    return plan_splits(files, compression=compression, split_bytes=size, min_partitions=least)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 2000))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_covered_once_by_ranges_of_whole_records(frame, tmp_path, sizes, size) -> None:
    starts = {0, *np.cumsum([n + 16 for n in sizes])[:-1].tolist()}
    file = write(tmp_path / "f", frame([bytes(n) for n in sizes]))
    ranges = [split for group in plan(file, size=size) for split in group]
    assert ranges[0].start == 0
    assert ranges[-1].stop is None
    assert [r.stop for r in ranges[:-1]] == [r.start for r in ranges[1:]]
    assert {r.start for r in ranges} <= starts
    largest = max(n + 16 for n in sizes)
    lengths = np.diff([*(r.start for r in ranges), file.bytes])
    assert lengths.max() < size + largest
    assert all(r.partition == ("p",) for r in ranges)


def test_offsets_of_the_manifest_are_taken_without_a_look(tmp_path: Path) -> None:
    file = write(tmp_path / "f", bytes(1000), (90, 210, 290, 390, 800))
    assert [s.start for g in plan(file, size=200) for s in g] == [0, 210, 800]
    none = write(tmp_path / "g", bytes(1000), ())  # listed, and no offset known
    assert [s.start for g in plan(none, size=200) for s in g] == [0]


def test_side_index_is_used_where_it_fits(frame, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "date=1"
    folder.mkdir()
    file = write(folder / "f", frame([bytes(84)] * 10))
    index = tmp_path / "_index" / "date=1" / "f.idx"
    index.parent.mkdir(parents=True)
    monkeypatch.setattr(framing_kernels, "walk_headers", lambda *a: pytest.fail("walked"))
    index.write_text("".join(f"{100 * k} 100\n" for k in range(10)))
    assert [s.start for g in plan(file, size=300) for s in g] == [0, 300, 600, 900]
    monkeypatch.undo()
    for text in ("", "0 100\n", "x", "0 990\n990 10\n"):
        index.write_text(text)
        assert [s.start for g in plan(file, size=300) for s in g] == [0, 300, 600, 900]


def test_compressed_files_stay_whole(frame, tmp_path: Path) -> None:
    data = gzip.compress(frame([np.random.default_rng(k).bytes(100) for k in range(50)]))
    file = write(tmp_path / "f.gz", data)
    assert len(plan(file, size=100)) == 1
    assert len(plan(file, size=100, compression="GZIP")) == 1


def test_small_files_share_partitions_in_order(frame, tmp_path: Path) -> None:
    files = [write(tmp_path / f"f{k}", frame([bytes(84)])) for k in range(7)]
    empty = write(tmp_path / "f9", b"")
    names = [[Path(s.path).name for s in group] for group in plan(*files, empty, size=300)]
    assert names == [["f0", "f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
    assert plan(empty, size=300) == []


def test_small_data_still_makes_the_wanted_partitions(frame, tmp_path: Path) -> None:
    file = write(tmp_path / "f", frame([bytes(84)] * 100))
    assert len(plan(file, size=128 * MIB, least=4)) == 4


def test_damage_stays_within_one_split(frame, tmp_path: Path) -> None:
    data = bytearray(frame([bytes(84)] * 10))
    data[500] ^= 1
    file = write(tmp_path / "f", bytes(data))
    assert [s.start for g in plan(file, size=200) for s in g] == [0, 200, 400]
