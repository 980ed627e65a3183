"""One holds at a time a claim or a lease, which are taken from the dead alone; pointers move."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from conf.errors import UpstreamNotReadyError
from conf.publication import holds
from conf.publication.entries import move_pointer, read_pointer, set_pointer
from conf.publication.holds import (
    CUT_SHORT_STALE_S,
    LAPSE_S,
    LEASE_KEY,
    STALE_S,
    hold_claim,
    hold_lease,
    read_holder,
)
from conf.storage.locations import StoredPath
from conf.storage.object_store import Storage
from conf.storage.processes import Owner
from tests.fake_store import FakeStore


def test_only_one_holds_at_a_time(tmp_path):
    inside, most = [], []

    def work() -> None:
        for _ in range(5):
            with hold_claim(tmp_path / "c"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert most == [1] * 20
    assert not (tmp_path / "c").exists()


def test_the_claim_of_a_dead_process_is_broken_at_once(tmp_path):
    code = (
        "import os; from pathlib import Path; from conf.publication.holds import hold_claim\n"
        f"with hold_claim(Path({str(tmp_path / 'c')!r})):\n    os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / "c").exists()
    with (
        hold_claim(tmp_path / "c", wait_s=1),
        pytest.raises(UpstreamNotReadyError, match="is publishing here"),
        hold_claim(tmp_path / "c", wait_s=0.1),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "stale_s"), [('{"nonce": "1", "owner": null}', STALE_S), ("", CUT_SHORT_STALE_S)]
)
def test_a_claim_that_nobody_can_be_asked_for_lapses_with_age(tmp_path, text, stale_s):
    """Of another machine; or its writer died before it had written it."""
    (tmp_path / "c").write_text(text)
    with pytest.raises(UpstreamNotReadyError), hold_claim(tmp_path / "c", wait_s=0.1):
        pass
    old = time.time() - stale_s - 5
    os.utime(tmp_path / "c", (old, old))
    with hold_claim(tmp_path / "c", wait_s=1) as claim:
        claim.check()
        # Somebody took this one for dead.
        (tmp_path / "c").write_text("another one")
        with pytest.raises(UpstreamNotReadyError, match="took this one for dead"):
            claim.check()
    assert (tmp_path / "c").read_text() == "another one"


def test_one_process_at_a_time_holds_a_lease(any_root: Storage) -> None:
    assert read_holder(any_root) is None
    with hold_lease(any_root, "first") as lease:
        lease.check()
        with pytest.raises(UpstreamNotReadyError), hold_lease(any_root, "second"):
            pass
        lease.renew()
        lease.check()
    assert read_holder(any_root) == "first"
    with hold_lease(any_root, "second"):
        assert read_holder(any_root) == "second"


def put_note(root: Storage, owner: Owner | None) -> None:
    note = {"holder": "other", "owner": None if owner is None else asdict(owner)}
    root.put(LEASE_KEY, json.dumps(note).encode())


def test_a_lease_of_a_dead_process_is_taken_over_and_of_another_machine_lapses(
    store: FakeStore, root: Storage, dead_owner: Owner, live_owner: Owner
) -> None:
    put_note(root, dead_owner)
    with hold_lease(root, "me") as lease:
        lease.check()
    for owner in (live_owner, None):
        put_note(root, owner)
        with pytest.raises(UpstreamNotReadyError, match="another process"), hold_lease(root, "me"):
            pass
    store.age(f"data/{LEASE_KEY}", LAPSE_S + 1)
    with hold_lease(root, "me"):
        pass


def test_who_was_taken_over_finds_out(store: FakeStore, root: Storage) -> None:
    with hold_lease(root, "me") as lease:
        put_note(root, None)
        lease.renew()
        with pytest.raises(UpstreamNotReadyError, match="took this one for dead"):
            lease.check()
    assert read_holder(root) == "other"


def test_a_lease_is_renewed_in_the_background(
    store: FakeStore, root: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "RENEWAL_S", 0.01)
    with hold_lease(root, "me") as lease:
        end = time.monotonic() + 120
        while sum(line.startswith("put") for line in store.log) < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        lease.check()


def test_a_renewal_whose_answer_got_lost_keeps_the_lease(store: FakeStore, root: Storage) -> None:
    with hold_lease(root, "me") as lease:
        real = store.put

        def put(path: str, data: bytes, over: object) -> None:
            real(path, data, over)
            raise FileExistsError("the retry met its own first try")

        store.put = put  # type: ignore[method-assign]
        lease.renew()
        store.put = real  # type: ignore[method-assign]
        lease.check()
        lease.renew()
        lease.check()


def test_the_pointer_moves_unless_another_one_was_faster(any_root: Storage) -> None:
    base = StoredPath(any_root)
    assert read_pointer(base) is None
    move_pointer(base, "v1", before=None)
    move_pointer(base, "v2", before="v1")
    with pytest.raises(UpstreamNotReadyError, match="another version has become current"):
        move_pointer(base, "v3", before="v1")
    assert read_pointer(base) == "v2"


def test_a_pointer_that_moves_in_between_is_looked_at_again(store: FakeStore) -> None:
    root, faster = Storage("s3", "bucket/data"), ["v0", "v0"]
    set_pointer(StoredPath(root), "v0")

    def move(name: str) -> None:
        if name.startswith("put") and faster:
            root.put("CURRENT", f"{faster.pop()}\n".encode())

    store.hook = move
    move_pointer(StoredPath(root), "v1", before="v0")
    assert (read_pointer(StoredPath(root)), faster) == ("v1", [])
