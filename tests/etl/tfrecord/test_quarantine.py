"""What is set aside, and that attempts and repeated reads do not double it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etl.tfrecord.quarantine import DamageLog, QuarantinedRange, read_quarantine
from etl.tfrecord.recovery import BadRange


def bad(offset: int, data: bytes, record: int | None = None, continues: bool = False) -> BadRange:
    return BadRange(offset, np.frombuffer(data, np.uint8), record, "why", continues)


def test_pieces_become_one_range_and_bytes_are_kept(tmp_path: Path) -> None:
    with DamageLog("/data/f", 0, str(tmp_path / "aside")) as log:
        log.add(bad(10, b"abc", 1))
        log.add(bad(20, b"de", 5))
        log.add(bad(22, b"fgh", 5, continues=True))
        log.add(bad(25, b"", None))
    first, second, last = read_quarantine(tmp_path / "aside")
    assert (first.offset, first.length, first.record, first.reason) == (10, 3, 1, "why")
    assert (second.offset, second.length, last.length) == (20, 5, 0)
    saved = (tmp_path / "aside" / str(second.saved_in)).read_bytes()
    assert saved[second.saved_at :][:5] == b"defgh"
    assert "3 bad range(s) of 8 bytes" in log.describe()


def read_until(error: BaseException, directory: Path, *ranges: BadRange) -> None:
    with DamageLog("/data/f", 0, str(directory)) as log:
        for item in ranges:
            log.add(item)
        raise error


def test_failed_attempt_leaves_nothing(tmp_path: Path, caplog) -> None:
    with pytest.raises(OSError, match="disk"):
        read_until(OSError("disk"), tmp_path, bad(1, b"x"))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""


def test_read_that_is_not_finished_tells_what_it_met_and_replaces_nothing(tmp_path, caplog):
    for ranges in ([bad(1, b"x"), bad(5, b"y")], [bad(1, b"x")]):
        with pytest.raises(GeneratorExit):
            read_until(GeneratorExit(), tmp_path, *ranges)
        assert [found.offset for found in read_quarantine(tmp_path)] == [1, 5]
    assert "2 bad range(s)" in caplog.text
    assert "1 bad range(s)" in caplog.text


def test_next_read_replaces_what_the_last_one_left(tmp_path: Path) -> None:
    for ranges in ([bad(1, b"x"), bad(5, b"y")], [bad(5, b"y")], []):
        with DamageLog("/data/f", 0, str(tmp_path)) as log:
            for item in ranges:
                log.add(item)
        assert [found.offset for found in read_quarantine(tmp_path)] == [r.offset for r in ranges]
    assert list(tmp_path.iterdir()) == []


def test_other_splits_of_a_file_do_not_double_a_range(tmp_path: Path) -> None:
    for start in (0, 100):
        with DamageLog("/data/f", start, str(tmp_path)) as log:
            log.add(bad(200, b"x"))
    with DamageLog("/other/f", 0, str(tmp_path)) as log:
        log.add(bad(200, b"x"))
    assert [found.file for found in read_quarantine(tmp_path)] == ["/data/f", "/other/f"]


def test_counting_alone_writes_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DamageLog("/data/f", 0, None) as log:
        log.add(bad(1, b"x", 7))
    assert log.ranges == [QuarantinedRange("/data/f", 1, 1, 7, "why")]
    assert list(tmp_path.iterdir()) == []
