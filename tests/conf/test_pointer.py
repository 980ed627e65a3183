"""The CURRENT pointer: what it resolves to, and what it must never resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.pointer import EntryKind, check_name, complete_entries, resolve_entry

KIND = EntryKind("thing", "things", "done.json", "make one")


def make_entry(base: Path, name: str, complete: bool = True) -> Path:
    entry = base / "things" / name
    entry.mkdir(parents=True)
    if complete:
        (entry / "done.json").touch()
    return entry


def test_only_complete_entries_count(tmp_path):
    make_entry(tmp_path, "b")
    make_entry(tmp_path, "a")
    make_entry(tmp_path, "c", complete=False)
    make_entry(tmp_path, ".staging-d")
    assert complete_entries(tmp_path, KIND) == ["a", "b"]
    assert complete_entries(tmp_path / "nowhere", KIND) == []


def test_directory_and_entry_resolve_to_the_entry(tmp_path):
    entry = make_entry(tmp_path, "a")
    with pytest.raises(UpstreamNotReadyError):
        resolve_entry(tmp_path, KIND)
    (tmp_path / "CURRENT").write_text("a\n")
    assert resolve_entry(tmp_path, KIND) == resolve_entry(entry, KIND) == entry


@pytest.mark.parametrize("current", ["c", "x", "", "../things/a", ".staging-d"])
def test_incomplete_missing_and_escaping_entries_are_refused(tmp_path, current):
    make_entry(tmp_path, "a")
    make_entry(tmp_path, "c", complete=False)
    make_entry(tmp_path, ".staging-d")
    (tmp_path / "CURRENT").write_text(current)
    with pytest.raises(InputDataError) as refused:
        resolve_entry(tmp_path, KIND)
    assert "allowed:  a" in str(refused.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "ü"])
def test_names_are_plain(name):
    with pytest.raises(ConfigError):
        check_name("thing", name)
