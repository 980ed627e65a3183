"""Folders that are replaced whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import UpstreamNotReadyError
from conf.storage import atomic_output
from conf.storage.atomic_output import staged_directory


def _write(target: Path, text: str) -> None:
    with staged_directory(target) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "file").write_text(text)


def _fail_half_way(target: Path) -> None:
    with staged_directory(target) as staging:
        (staging / "half").write_text("x")
        raise OSError("disk")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_directory_is_replaced_whole_or_not(
    tmp_path: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        monkeypatch.setattr(atomic_output, "exchange", lambda first, second: False)
    target = tmp_path / "export"
    _write(target, "one")
    with pytest.raises(OSError, match="disk"):
        _fail_half_way(target)
    assert (target / "sub" / "file").read_text() == "one"
    _write(target, "two")
    assert (target / "sub" / "file").read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "export"]
    with staged_directory(target), pytest.raises(UpstreamNotReadyError, match="another process"):
        _write(target, "other")


def test_a_killed_writer_is_swept_and_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "export"
    _write(target, "one")
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from conf.storage.atomic_output import staged_directory\n"
        "with staged_directory(Path(sys.argv[1])) as staging:\n"
        "    (staging / 'half').write_text('x'); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert done.returncode == -9
    assert (target / "sub" / "file").read_text() == "one"
    target.rename(tmp_path / ".export.replaced")  # A kill between two renames is repaired.
    with pytest.raises(OSError, match="disk"):
        _fail_half_way(target)
    assert (target / "sub" / "file").read_text() == "one"
    _write(target, "two")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "export"]
