"""Folders that last as long as their process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conf.storage.locks import hold_folder

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom conf.storage.locks import hold_folder\n"
    "with hold_folder('kept-', Path(sys.argv[1])) as folder:\n"
    "    (folder / 'file').touch()\n    print(folder, flush=True)\n    time.sleep(600)"
)


def test_what_a_killed_process_left_goes_and_what_a_live_one_holds_stays(tmp_path: Path) -> None:
    (tmp_path / "kept-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        try:
            with hold_folder("kept-", tmp_path) as folder:
                assert folder.name.startswith("kept-")
                assert (held / "file").exists()
            assert not folder.exists()
        finally:
            process.kill()
    assert held.exists()
    with hold_folder("kept-", tmp_path) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, "kept-link", "other"}
    assert tmp_path.exists()
