"""A process is dead only when that is certain."""

import os
import subprocess
from dataclasses import replace

import pytest

from etl.tfrecord.publishing import liveness
from etl.tfrecord.publishing.liveness import Owner, describe_process, find_owner, is_dead


def test_a_live_process_is_not_dead_and_a_dead_one_is() -> None:
    process = subprocess.Popen(["sleep", "60"])
    owner = describe_process(process.pid)
    assert not is_dead(owner)
    process.kill()
    assert owner == Owner.loads(owner.dumps())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner)  # a zombie counts as dead
    process.wait()
    assert is_dead(owner)


def test_another_process_of_the_same_id_is_told_apart() -> None:
    here = describe_process(os.getpid())
    assert not is_dead(here)
    assert is_dead(replace(here, start_ticks=here.start_ticks - 1))


def test_nothing_is_known_of_other_hosts_and_containers() -> None:
    gone = replace(describe_process(os.getpid()), start_ticks=-1)
    assert is_dead(gone)
    assert not is_dead(replace(gone, boot_id="another"))
    assert not is_dead(replace(gone, pid_namespace="pid:[1]"))


def test_without_a_jvm_above_there_is_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    # There may be one in earnest: build servers are written in Java.
    monkeypatch.setattr(liveness, "_executable", lambda pid: "python3")
    assert find_owner() is None
    monkeypatch.setattr(liveness, "_executable", lambda pid: {os.getppid(): "java"}.get(pid, "sh"))
    assert find_owner() == describe_process(os.getppid())


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "null"])
def test_damaged_records_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Owner.loads(text)
