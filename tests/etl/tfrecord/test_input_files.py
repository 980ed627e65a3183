"""Which files a read finds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import COMMIT_FILE, Committed, CommittedShard
from etl.tfrecord.features import WireFeature
from etl.tfrecord.input_files import list_input_files
from etl.tfrecord.read_options import parse_read_options


def listed(path: Path, **options: str):
    return list_input_files(parse_read_options({"path": str(path), **options}))


def names(path: Path, **options: str) -> list[str]:
    return [Path(file.path).name for file in listed(path, **options).files]


def touch(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def commit(root: Path, *shards: tuple[str, int]) -> None:
    manifest = Committed(
        "Example", None, (WireFeature("x", "int64"),), {}, (("date", "string"),),
        tuple(CommittedShard(p, 1, n, "0" * 8, "job", 0, {}, (5,)) for p, n in shards),
    )  # fmt: skip
    (root / COMMIT_FILE).write_text(manifest.dumps())


def test_directories_globs_and_single_files(tmp_path: Path) -> None:
    for folder in ("d1", "d2", "d1/plain"):
        for name in ("b", "a", "_x", ".y"):
            touch(tmp_path / folder / name)
    assert names(tmp_path / "d1") == ["a", "b"]
    assert len(names(tmp_path / "d*")) == 4
    assert names(tmp_path / "d1" / "a") == ["a"]
    assert names(tmp_path / "d1", recursiveFileLookup="true") == ["a", "b", "a", "b"]
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


def test_listed_file_that_is_gone_is_refused_but_not_a_partition_that_is(tmp_path: Path) -> None:
    for name in ("date=2026-01-01/f", "date=2026-01-01/g", "date=2026-01-02/f"):
        touch(tmp_path / name, b"12345678")
    commit(tmp_path, *((f"date=2026-01-0{n}", 8) for n in ("1/f", "1/g", "2/f")))
    (tmp_path / "date=2026-01-02" / "f").unlink()
    with pytest.raises(InputDataError, match=r"(?s)date=2026-01-02/f is missing.*1 of 3"):
        listed(tmp_path)
    assert names(tmp_path / "date=2026-01-01") == ["f", "g"]
    (tmp_path / "date=2026-01-02").rmdir()
    assert names(tmp_path) == ["f", "g"]


def test_manifest_with_an_unknown_kind_is_damaged(tmp_path: Path) -> None:
    touch(tmp_path / "f", b"12345678")
    commit(tmp_path, ("f", 8))
    manifest = tmp_path / COMMIT_FILE
    manifest.write_text(manifest.read_text().replace('"int64"', '"float"'))
    with pytest.raises(InputDataError, match=r"(?s)damaged.*of kind 'float'"):
        listed(tmp_path)


def test_unfinished_write_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "f")
    (tmp_path / "_publishing-1").mkdir()
    with pytest.raises(InputDataError, match="no complete set"):
        listed(tmp_path)
