"""Which files a read finds, and what it refuses."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.commit.output_directory import COMMIT_FILE, OutputManifest, OutputShard
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.spark import input_files
from etl.tfrecord.spark.input_files import list_input_files, plan_splits
from etl.tfrecord.spark.options import ReadOptions, parse_read_options
from etl.tfrecord.types.features import WireFeature


def listed(path: Path, **options: str):
    return list_input_files(parse_read_options({"path": str(path), **options}))


def names(path: Path, **options: str) -> list[str]:
    return [Path(file.path).name for file in listed(path, **options).files]


def touch(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def commit(root: Path, *shards: tuple[str, int]) -> None:
    manifest = OutputManifest(
        "Example", None, (WireFeature("x", "int64"),), {}, (("date", "string"),),
        tuple(OutputShard(p, 1, n, "0" * 8, "job", 0, {}, (5,)) for p, n in shards),
    )  # fmt: skip
    (root / COMMIT_FILE).write_text(manifest.dumps())


def test_directories_globs_and_single_files(tmp_path: Path) -> None:
    for folder in ("d1", "d2", "d1/plain"):
        for name in ("b", "a", "_x", ".y"):
            touch(tmp_path / folder / name)
    assert names(tmp_path / "d1") == ["a", "b"]
    assert len(names(tmp_path / "d*")) == 4
    assert names(tmp_path / "d1" / "a") == ["a"]
    with pytest.raises(ConfigError, match="no such"):
        listed(tmp_path / "none")


def test_partitions_and_hidden_directories(tmp_path: Path) -> None:
    for part in ("date=2026-01-01", "date=2026-01-02", "_date/x=1", ".date=1", "_p=3/q=1"):
        touch(tmp_path / "in" / part / "f")
    with pytest.raises(InputDataError, match="differ in their columns"):
        listed(tmp_path / "in")
    found = listed(tmp_path / "in" / "_p=3")
    assert (found.partition_columns, found.files[0].partition) == ((("q", "int"),), ("1",))
    found = listed(tmp_path / "in" / "date=*", basePath=str(tmp_path / "in"))
    assert found.partition_columns == (("date", "date"),)
    assert [file.partition for file in found.files] == [("2026-01-01",), ("2026-01-02",)]
    with pytest.raises(ConfigError, match="basePath"):
        listed(tmp_path / "in", basePath=str(tmp_path / "elsewhere"))


def test_manifest_gives_types_offsets_and_sizes(tmp_path: Path) -> None:
    touch(tmp_path / "date=2026-01-01" / "f", b"12345678")
    commit(tmp_path, ("date=2026-01-01/f", 8))
    for path in (tmp_path, tmp_path / "date=2026-01-01", tmp_path / "date=2026-01-01" / "f"):
        found = listed(path)
        assert found.committed is not None
        assert found.files[0].split_offsets == (5,)
    assert listed(tmp_path).partition_columns == (("date", "string"),)
    commit(tmp_path, ("date=2026-01-01/f", 9))
    with pytest.raises(InputDataError, match=r"(?s)another size.*8 bytes.*9 bytes"):
        listed(tmp_path)


def test_file_that_no_manifest_lists_is_read_and_takes_it_out_of_use(tmp_path: Path, caplog):
    touch(tmp_path / "date=2026-01-01" / "f", b"12345678")
    commit(tmp_path, ("date=2026-01-01/f", 8))
    touch(tmp_path / "date=2026-01-01" / "g")
    found = listed(tmp_path)
    assert [file.split_offsets for file in found.files] == [(5,), None]
    assert found.committed is None
    assert "not in the manifest" in caplog.text


def test_listed_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    for name in ("date=2026-01-01/f", "date=2026-01-01/g", "date=2026-01-02/f"):
        touch(tmp_path / name, b"12345678")
    commit(tmp_path, *((f"date=2026-01-0{n}", 8) for n in ("1/f", "1/g", "2/f")))
    (tmp_path / "date=2026-01-02" / "f").unlink()
    for _ in range(2):
        with pytest.raises(InputDataError, match=r"(?s)date=2026-01-02/f is missing.*1 of 3"):
            listed(tmp_path)
        assert names(tmp_path / "date=2026-01-01") == ["f", "g"]
        if (tmp_path / "date=2026-01-02").exists():  # whether or not its folder is left
            (tmp_path / "date=2026-01-02").rmdir()


@pytest.mark.parametrize("path", [".p=1/f", "_hidden/f", "plain/f", "_f"])
def test_listed_file_that_is_not_read_is_refused(tmp_path: Path, path: str) -> None:
    touch(tmp_path / path, b"12345678")
    commit(tmp_path, (path, 8))
    with pytest.raises(InputDataError, match="is missing"):
        listed(tmp_path)


def test_linked_folders_are_read_once_by_each_name(tmp_path: Path) -> None:
    touch(tmp_path / "far" / "f")
    touch(tmp_path / "in" / "p=1" / "g")
    (tmp_path / "in" / "p=2").symlink_to("../far")
    (tmp_path / "in" / "p=1" / "q=1").symlink_to("..")
    found = listed(tmp_path / "in")
    assert [file.partition for file in found.files] == [("1",), ("2",)]


def test_unfinished_write_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "f")
    (tmp_path / "_publishing-1").mkdir()
    with pytest.raises(InputDataError, match="no complete set"):
        listed(tmp_path)


MIB = 1 << 20


@pytest.fixture
def _cheap_files(monkeypatch) -> None:
    monkeypatch.setattr(input_files, "OPEN_COST_BYTES", 0)


def write(path: Path, data: bytes, offsets: tuple[int, ...] | None = None) -> DataFile:
    path.write_bytes(data)
    return DataFile(str(path), len(data), ("p",), offsets)


def plan(*files: DataFile, size: int, least: int = 1, compression="auto"):
    options = ReadOptions((), compression=compression, split_bytes=size, min_partitions=least)
    return plan_splits(files, options)


@pytest.mark.usefixtures("_cheap_files")
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


@pytest.mark.usefixtures("_cheap_files")
def test_offsets_of_the_manifest_are_taken_without_a_look(tmp_path: Path) -> None:
    file = write(tmp_path / "f", bytes(1000), (90, 210, 290, 390, 800))
    assert [s.start for g in plan(file, size=200) for s in g] == [0, 210, 800]
    none = write(tmp_path / "g", bytes(1000), ())  # listed, and no offset known
    assert [s.start for g in plan(none, size=200) for s in g] == [0]


@pytest.mark.usefixtures("_cheap_files")
def test_compressed_files_stay_whole(frame, tmp_path: Path) -> None:
    data = gzip.compress(frame([np.random.default_rng(k).bytes(100) for k in range(50)]))
    file = write(tmp_path / "f.gz", data)
    assert len(plan(file, size=100)) == 1
    assert len(plan(file, size=100, compression="GZIP")) == 1


@pytest.mark.usefixtures("_cheap_files")
def test_small_files_share_partitions_in_order(frame, tmp_path: Path) -> None:
    files = [write(tmp_path / f"f{k}", frame([bytes(84)])) for k in range(7)]
    empty = write(tmp_path / "f9", b"")
    names = [[Path(s.path).name for s in group] for group in plan(*files, empty, size=300)]
    assert names == [["f0", "f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
    assert plan(empty, size=300) == []


@pytest.mark.usefixtures("_cheap_files")
def test_small_data_still_makes_the_wanted_partitions(frame, tmp_path: Path) -> None:
    file = write(tmp_path / "f", frame([bytes(84)] * 100))
    assert len(plan(file, size=128 * MIB, least=4)) == 4
