import os
from pathlib import Path

import pytest

from conf.errors import ConfigError, InternalError
from etl.samples.staging import stage_directory


def publish(out, text="new", *, overwrite=False):
    with stage_directory(out, "CARD", overwrite=overwrite) as staging:
        (staging / "CARD").write_text(text)


def test_publishes_into_new_nested_and_empty_directories(tmp_path):
    publish(tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    publish(tmp_path / "empty")
    assert (tmp_path / "a" / "b" / "CARD").read_text() == "new"
    assert (tmp_path / "empty" / "CARD").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["a", "empty"]


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
    assert os.listdir(tmp_path) == ["out"]


def test_a_failed_block_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "out"
    publish(out, "old")
    with pytest.raises(UnicodeEncodeError):
        publish(out, "half \udc80", overwrite=True)
    assert (out / "CARD").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


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
        stage_directory(tmp_path / "out", "CARD", overwrite=False),
    ):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == ["file"]


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


def kill_at_rename(number, monkeypatch, out):
    """Publishes into `out` and dies before its rename with that number."""
    renames = [number]
    original = Path.replace

    def replace(self, target):
        renames[0] -= 1
        if renames[0] < 0:
            raise Killed
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            publish(out, "lost", overwrite=True)


@pytest.mark.parametrize("renames", [0, 1])
def test_what_a_killed_process_left_is_restored_and_swept(tmp_path, monkeypatch, renames):
    out = tmp_path / "out"
    publish(out, "old")
    kill_at_rename(renames, monkeypatch, out)
    assert len(os.listdir(tmp_path)) > 1
    with pytest.raises(ConfigError, match="not empty"):
        publish(out)
    assert (out / "CARD").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_live_process_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with stage_directory(out, "CARD", overwrite=False) as staging:
        (staging / "CARD").write_text("slow")
        publish(tmp_path / "other")
        publish(out, "quick")
        assert staging.is_dir()
        (out / "CARD").unlink()
    assert (out / "CARD").read_text() == "slow"


def test_leftovers_of_other_names_are_not_ours(tmp_path):
    (tmp_path / ".out2.partial-x").mkdir()
    (tmp_path / ".out.notes").mkdir()
    publish(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".out.notes", ".out2.partial-x", "out"]
