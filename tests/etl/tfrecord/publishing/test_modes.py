"""Save modes, and what counts as output."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError, UpstreamNotReadyError
from etl.tfrecord.publishing.listing import changed_partitions, digest_partitions, list_data_files
from etl.tfrecord.publishing.modes import Baseline, check_baseline, holds_output, take_baseline


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_what_is_a_shard(tmp_path: Path) -> None:
    shards = ["d=1/c=x/part-0", "d=1/x.tfrecord.gz", "part-r-00000"]
    touch(tmp_path, *shards, "notes.txt", "_index/part-0.idx", "backup/part-0", ".d=1/part-0",
          "_temporary-j/part-0", "_d=2/part-1", ".part-0.tfrecord.tmp")  # fmt: skip
    assert list_data_files(tmp_path) == shards
    assert list_data_files(tmp_path / "absent") == []


def test_a_digest_changes_with_a_file_and_not_with_its_neighbours(tmp_path: Path) -> None:
    touch(tmp_path, "d=1/part-0", "d=2/part-0", "part-0")
    before = digest_partitions(tmp_path)
    assert set(before) == {"", "d=1", "d=2"}
    touch(tmp_path, "notes.txt")
    assert digest_partitions(tmp_path) == before
    (tmp_path / "d=1" / "part-0").rename(tmp_path / "away")
    assert changed_partitions(before, digest_partitions(tmp_path), None) == ["d=1"]
    assert changed_partitions(before, digest_partitions(tmp_path), {"d=2"}) == []
    (tmp_path / "away").rename(tmp_path / "d=1" / "part-0")
    assert digest_partitions(tmp_path) == before
    touch(tmp_path, "d=3/part-0")
    assert changed_partitions(before, digest_partitions(tmp_path), {"d=3"}) == ["d=3"]


def test_an_empty_directory_holds_no_output(tmp_path: Path) -> None:
    touch(tmp_path, "_temporary-j/part-0", "notes.txt")
    assert not holds_output(tmp_path)
    take_baseline(tmp_path, "errorifexists")
    touch(tmp_path, "_SUCCESS")
    assert holds_output(tmp_path)
    with pytest.raises(ConfigError, match="holds data already"):
        take_baseline(tmp_path, "errorifexists")


def test_only_what_is_replaced_counts(tmp_path: Path) -> None:
    touch(tmp_path, "d=1/part-0", "d=2/part-0")
    baseline = take_baseline(tmp_path, "overwrite")
    assert Baseline.loads(baseline.dumps()) == baseline
    touch(tmp_path, "d=2/part-1")
    check_baseline(tmp_path, "overwrite", baseline, {"d=1", "d=9"})
    check_baseline(tmp_path, "append", baseline, set())
    with pytest.raises(UpstreamNotReadyError, match=r"(?s)d=2.*left no manifest"):
        check_baseline(tmp_path, "overwrite", baseline, None)


@pytest.mark.parametrize("mode", ["append", "overwrite", "errorifexists", "ignore"])
def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, mode) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ConfigError, match="is a file"):
        take_baseline(tmp_path / "out", mode)
    assert (tmp_path / "out").read_text() == "precious"
