"""Archives: checked and unpacked, complete or not at all."""

import hashlib
import json
import os

import pytest

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from etl.sample_data import archive
from etl.sample_data.archive import fetch_archive, replace_directory
from tests.etl.sample_data.helpers import FILES, Script, make_zip, serve


def listed(folder):
    """What is in a folder, the files that processes lock aside."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def publish(out, text="new", *, overwrite=False):
    with replace_directory(out, "CARD", overwrite=overwrite) as staging:
        (staging / "CARD").write_text(text)


def test_publishes_into_new_nested_and_empty_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "a" / "b", tmp_path / "empty"):
        publish(out)
        assert (out / "CARD").read_text() == "new"
    assert listed(tmp_path) == ["a", "empty"]


def test_replaces_only_on_request_and_only_its_own_kind(tmp_path):
    out, file, link = tmp_path / "out", tmp_path / "file", tmp_path / "link"
    publish(out, "old")
    file.write_text("x")
    link.symlink_to(out)
    for target, overwrite in ((out, False), (file, True), (link, True)):
        with pytest.raises(ConfigError):
            publish(target, overwrite=overwrite)
    assert (out / "CARD").read_text() == "old"
    publish(out, overwrite=True)
    assert (out / "CARD").read_text() == "new"
    (out / "CARD").rename(out / "thesis.txt")
    with pytest.raises(ConfigError):
        publish(out, overwrite=True)
    assert listed(tmp_path) == ["file", "link", "out"]
    assert (out / "thesis.txt").exists()


def test_a_failed_block_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(MemoryError), replace_directory(out, "CARD", overwrite=True):
        raise MemoryError
    assert (out / "CARD").read_text() == "old"
    assert listed(tmp_path) == ["out"]


def test_a_live_process_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with replace_directory(out, "CARD", overwrite=False) as staging:
        (staging / "CARD").write_text("slow")
        with pytest.raises(UpstreamNotReadyError):
            publish(out, "quick")
    assert (out / "CARD").read_text() == "slow"


def fetch(script, out, monkeypatch, *, published=None):
    sha256 = hashlib.sha256(published or script.body).hexdigest()
    monkeypatch.setitem(archive.ARCHIVES, "ml-x", sha256)
    with serve(script):
        fetch_archive("ml-x", out, script.base_url, overwrite=True)


def test_downloads_again_verifies_and_strips_the_top_folder(tmp_path, monkeypatch):
    script = Script(make_zip(), failures=[503])
    fetch(script, tmp_path / "out", monkeypatch)
    assert script.asked == ["/sets/ml-x.zip"] * 2
    assert sorted(os.listdir(tmp_path / "out")) == ["DOWNLOAD.json", "README", "users.dat"]
    assert (tmp_path / "out" / "README").read_bytes() == FILES["ml-x/README"]
    card = json.loads((tmp_path / "out" / "DOWNLOAD.json").read_text())
    assert card["sha256"] == hashlib.sha256(script.body).hexdigest()
    assert card["files"] == {"README": {"bytes": 10}, "users.dat": {"bytes": 19}}


def test_a_download_stops_above_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_MOST_BYTES", 10_000)
    script = Script(b"x" * 20_000, stated_length=1 << 40)
    with pytest.raises(InputDataError, match="10,000 bytes"):
        fetch(script, tmp_path / "out", monkeypatch)
    assert len(script.asked) == 1
    assert listed(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"body": b"other"}, InputDataError),
        ({"failures": [404]}, UpstreamNotReadyError),
        ({"stated_length": 10_000}, UpstreamNotReadyError),
    ],
)
def test_a_refused_download_leaves_the_earlier_one(tmp_path, monkeypatch, answer, error):
    monkeypatch.setattr(archive, "_RETRIES", 0)
    fetch(Script(make_zip()), tmp_path / "out", monkeypatch)
    with pytest.raises(error):
        fetch(Script(**{"body": make_zip(), **answer}), tmp_path / "out", monkeypatch,
              published=make_zip())  # fmt: skip
    assert (tmp_path / "out" / "users.dat").read_bytes() == FILES["ml-x/users.dat"]
    assert listed(tmp_path) == ["out"]
