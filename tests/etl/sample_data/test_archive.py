"""Archives: checked and unpacked, complete or not at all."""

import json
import os

import pytest

from conf.errors import ConfigError, InputDataError, InternalError, UpstreamNotReadyError
from etl.sample_data import archive as archive_module
from etl.sample_data.archive import fetch_archive, replace_directory
from tests.etl.sample_data.helpers import FILES, Script, make_archive, make_zip, serve


def listed(folder):
    """What is in a folder, the files that processes lock aside."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def publish(out, text="new", *, overwrite=False):
    with replace_directory(out, "CARD", overwrite=overwrite) as staging:
        (staging / "CARD").write_text(text)


def test_publishes_into_new_nested_and_empty_directories(tmp_path):
    publish(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    assert (tmp_path / "a" / "b" / "CARD").read_text() == "new"
    assert (tmp_path / "empty" / "CARD").read_text() == "new"
    assert listed(tmp_path) == ["a", "empty"]


def test_replaces_only_on_request_and_only_its_own_kind(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(ConfigError, match="not empty"):
        publish(out)
    assert (out / "CARD").read_text() == "old"
    publish(out, overwrite=True)
    assert (out / "CARD").read_text() == "new"
    (out / "CARD").rename(out / "thesis.txt")
    with pytest.raises(ConfigError, match="refusing"):
        publish(out, overwrite=True)
    assert (out / "thesis.txt").exists()
    assert listed(tmp_path) == ["out"]


def test_a_failed_block_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(UnicodeEncodeError):
        publish(out, "half \udc80", overwrite=True)
    assert (out / "CARD").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_refuses_files_and_links(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="not a directory"):
            publish(tmp_path / name, overwrite=True)


def test_a_full_or_closed_disk_is_reported(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InternalError, match="cannot write"):
        publish(tmp_path / "file" / "below")
    with (
        pytest.raises(InternalError, match="No space"),
        replace_directory(tmp_path / "out", "CARD", overwrite=False),
    ):
        raise OSError(28, "No space left on device")
    assert listed(tmp_path) == ["file"]


@pytest.mark.parametrize("out_is_there", [True, False])
def test_what_a_killed_process_left_is_restored_and_swept(tmp_path, out_is_there):
    out, replaced = tmp_path / "out", tmp_path / ".out.replaced"
    publish(out, "old")
    (tmp_path / ".out.staging").mkdir()
    (tmp_path / ".out.staging" / "CARD").write_text("lost")
    if not out_is_there:  # killed between the two renames of a system that cannot swap names
        out.rename(replaced)
    with pytest.raises(ConfigError, match="not empty"):
        publish(out)
    assert (out / "CARD").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_a_live_process_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with replace_directory(out, "CARD", overwrite=False) as staging:
        (staging / "CARD").write_text("slow")
        publish(tmp_path / "other")
        with pytest.raises(UpstreamNotReadyError, match="another process"):
            publish(out, "quick")
        assert staging.is_dir()
    assert (out / "CARD").read_text() == "slow"


def test_leftovers_of_other_names_are_not_ours(tmp_path):
    (tmp_path / ".out2.staging").mkdir()
    (tmp_path / ".out.notes").mkdir()
    publish(tmp_path / "out")
    assert listed(tmp_path) == [".out.notes", ".out2.staging", "out"]


def fetch(script, out, archive=None, *, overwrite=False):
    with serve(script):
        known = archive or make_archive(script.body)
        return fetch_archive(known, out, script.base_url, overwrite=overwrite)


def test_downloads_verifies_and_strips_the_top_folder(tmp_path):
    script = Script(make_zip(), failures=[503])
    card = fetch(script, tmp_path / "out")
    assert script.asked == ["/sets/ml-x.zip"] * 2
    assert sorted(os.listdir(tmp_path / "out")) == ["DOWNLOAD.json", "README", "users.dat"]
    assert (tmp_path / "out" / "README").read_bytes() == FILES["ml-x/README"]
    assert json.loads((tmp_path / "out" / "DOWNLOAD.json").read_text()) == card


def test_a_refused_download_leaves_the_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "_RETRIES", 0)
    fetch(Script(make_zip()), tmp_path / "out")
    with pytest.raises(ConfigError, match="not empty"):
        fetch(Script(make_zip()), tmp_path / "out")
    with pytest.raises(InputDataError, match="not the published file"):
        fetch(Script(b"other"), tmp_path / "out", make_archive(make_zip()), overwrite=True)
    monkeypatch.setattr(archive_module, "MAX_BYTES", 100)
    with pytest.raises(InputDataError, match="too large"):
        fetch(Script(make_zip()), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "users.dat").read_bytes() == FILES["ml-x/users.dat"]
    assert listed(tmp_path) == ["out"]


@pytest.mark.parametrize("wrong", [{"failures": [404]}, {"stated_length": 10_000}])
def test_what_does_not_come_whole_is_upstream_not_ready(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(archive_module, "_RETRIES", 0)
    with pytest.raises(UpstreamNotReadyError):
        fetch(Script(make_zip(), **wrong), tmp_path / "out")
    assert listed(tmp_path) == []
