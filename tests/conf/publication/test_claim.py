"""A claim holds one at a time, is broken when its owner has died, and never while it lives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from conf.errors import UpstreamNotReadyError
from conf.publication.pointer import CUT_SHORT_STALE_S, STALE_S, hold_claim


def test_only_one_holds_at_a_time(tmp_path):
    inside, most = [], []

    def work() -> None:
        for _ in range(5):
            with hold_claim(tmp_path / "c"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20
    assert not (tmp_path / "c").exists()


def test_a_live_holder_is_waited_for_and_then_reported(tmp_path):
    with hold_claim(tmp_path / "c"):
        with (
            pytest.raises(UpstreamNotReadyError, match="is publishing here"),
            hold_claim(tmp_path / "c", wait_s=0.1),
        ):
            pass
        assert (tmp_path / "c").exists()


def test_the_claim_of_a_dead_process_is_broken_at_once(tmp_path):
    code = (
        "import os; from pathlib import Path; from conf.publication.pointer import hold_claim\n"
        f"with hold_claim(Path({str(tmp_path / 'c')!r})):\n    os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / "c").exists()
    with hold_claim(tmp_path / "c", wait_s=1):
        pass


def test_a_claim_of_another_machine_lapses_with_age(tmp_path):
    (tmp_path / "c").write_text('{"nonce": "1", "owner": null}')
    with pytest.raises(UpstreamNotReadyError), hold_claim(tmp_path / "c", wait_s=0.1):
        pass
    old = time.time() - STALE_S - 5
    os.utime(tmp_path / "c", (old, old))
    with hold_claim(tmp_path / "c", wait_s=1) as claim:
        claim.check()
        # Somebody took this one for dead.
        (tmp_path / "c").write_text('{"nonce": "2", "owner": null}')
        with pytest.raises(UpstreamNotReadyError, match="took this one for dead"):
            claim.check()
    assert (tmp_path / "c").read_text() == '{"nonce": "2", "owner": null}'


def test_a_claim_whose_writer_died_before_it_had_written_it_lapses_soon(tmp_path):
    (tmp_path / "c").touch()
    with pytest.raises(UpstreamNotReadyError), hold_claim(tmp_path / "c", wait_s=0.1):
        pass
    old = time.time() - CUT_SHORT_STALE_S - 1
    os.utime(tmp_path / "c", (old, old))
    with hold_claim(tmp_path / "c", wait_s=1):
        pass
