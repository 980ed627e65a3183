"""Versions resolve through CURRENT; damage is named; nothing outside the version is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conf.artefacts.dataset import (
    list_unlisted_files,
    published_versions,
    read_manifest,
    resolve_version,
)
from conf.artefacts.entries import EntryKind, check_entry_name, complete_entries, resolve_entry
from conf.artefacts.run import read_json, write_json
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.local_paths import list_visible_files, local_path
from conf.storage.atomic_output import atomic_file, remove_unfinished, write_text_atomic
from tests.datasets import build_manifest


def publish(base: Path, version_id: str = "v1") -> Path:
    version = base / "versions" / version_id
    (version / "train").mkdir(parents=True)
    (version / "train" / "part-0").write_bytes(b"x" * 16)
    (version / "manifest.json").write_text(build_manifest(version_id).dumps())
    (base / "CURRENT").write_text(version_id + "\n")
    return version


def test_current_and_direct_paths_resolve(tmp_path):
    version = publish(tmp_path)
    assert resolve_version(tmp_path) == version
    assert resolve_version(version) == version
    assert resolve_version(local_path(f"file://{tmp_path}")) == version
    assert published_versions(tmp_path) == ["v1"]


@pytest.mark.parametrize("start", ["file:///data/", "file://localhost/data/", "file:/data/"])
def test_a_file_uri_has_neither_query_nor_fragment(start):
    for name in ("a?b=c#d", "a%20b"):
        assert local_path(f"{start}{name}") == Path("/data") / name.replace("%20", " ")


def test_files_that_the_manifest_does_not_list(tmp_path):
    version = publish(tmp_path)
    manifest = read_manifest(version)
    assert list_unlisted_files(version, manifest) == []
    (version / "train" / "part-1.tfrecord").write_bytes(b"x")
    (version / "train" / "_SUCCESS").touch()
    assert list_unlisted_files(version, manifest) == ["train/part-1.tfrecord"]


def test_a_reader_may_do_without_a_shard_but_not_without_other_files(tmp_path):
    version = publish(tmp_path)
    shard = version / "train" / "part-0"
    asked = []

    def tolerates(split, found_bytes, listed_bytes):
        asked.append((split, found_bytes, listed_bytes))
        return found_bytes is None

    assert read_manifest(version, tolerates) == build_manifest("v1")
    assert asked == []  # nothing is wrong
    shard.write_bytes(b"x" * 9)
    with pytest.raises(InputDataError, match="not as long"):
        read_manifest(version, tolerates)
    shard.unlink()
    with pytest.raises(InputDataError, match="missing"):
        read_manifest(version)
    assert read_manifest(version, tolerates) == build_manifest("v1")
    assert asked == [("train", 9, 16), ("train", None, 16)]
    data = json.loads((version / "manifest.json").read_text())
    data["splits"][0]["shards"][0]["path"] = "../../gone"
    (version / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(InputDataError, match="outside"):
        read_manifest(version, tolerates)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "a.json"
    with atomic_file(target) as unfinished:
        unfinished.write_text("one")
        assert not target.exists()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space.*a\.json"):
        write_text_atomic(target, "new")
    assert target.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    for name in (".a.json.0f.tmp", ".b.json.0f.tmp"):  # What killed writers left.
        (tmp_path / name).touch()
    remove_unfinished(target)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.json", ".b.json.0f.tmp"}


KIND = EntryKind("thing", "things", "done.json", "make one")


def make_entry(base: Path, name: str, complete: bool = True) -> None:
    entry = base / "things" / name
    entry.mkdir(parents=True)
    if complete:
        (entry / "done.json").touch()


@pytest.mark.parametrize("current", ["c", "x", "", "../things/a", ".staging-d"])
def test_incomplete_missing_and_escaping_entries_are_refused(tmp_path, current):
    make_entry(tmp_path, "a")
    make_entry(tmp_path, "c", complete=False)
    make_entry(tmp_path, ".staging-d")
    with pytest.raises(UpstreamNotReadyError):
        resolve_entry(tmp_path, KIND)
    assert complete_entries(tmp_path, KIND) == ["a"]
    assert complete_entries(tmp_path / "nowhere", KIND) == []
    (tmp_path / "CURRENT").write_text(current)
    with pytest.raises(InputDataError) as refused:
        resolve_entry(tmp_path, KIND)
    assert "allowed:  a" in str(refused.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "ü"])
def test_names_are_plain(name):
    with pytest.raises(ConfigError):
        check_entry_name("thing", name)


def test_parts_added_at_the_same_time_all_stay(tmp_path):
    code = (
        "import sys; from pathlib import Path; from conf.artefacts.run import update_run_card\n"
        "for i in range(20): update_run_card(Path(sys.argv[1]), **{f'{sys.argv[2]}{i}': i})"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len(read_json(tmp_path / "run_card.json")) == 40


@pytest.mark.parametrize("text", [b"[]", b'{"a": "\xff"}'])
def test_json_is_sound_on_the_disk_or_refused(tmp_path, text):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    with pytest.raises(UpstreamNotReadyError):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(InputDataError):
        read_json(tmp_path / "a.json")


def test_visible_files_are_listed_by_the_names_that_lead_to_them(tmp_path: Path) -> None:
    for name in ("d/b/1", "d/.c/2", "far/3", "far/_4", "far/5._COPYING_"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name, target in (("a", "d/b"), ("c", "far"), ("e", "far"), ("up", "d"), ("gone", "gone")):
        (tmp_path / "d" / name).symlink_to(tmp_path / target)
    assert list_visible_files(tmp_path / "d") == [tmp_path / "d/b/1", tmp_path / "d/c/3"]
