"""A lease on a directory in a store: held by one, renewed, and taken over from the dead alone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest

from conf.errors import UpstreamNotReadyError
from conf.publication import lease as lease_module
from conf.publication.lease import LAPSE_S, LEASE_KEY, hold_lease, read_holder
from conf.storage.object_store import Storage
from conf.storage.processes import Owner
from tests.fake_store import FakeStore


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


def test_a_lease_of_a_process_that_ended_here_is_taken_over(
    store: FakeStore, root: Storage, dead_owner: Owner, live_owner: Owner
) -> None:
    put_note(root, dead_owner)
    with hold_lease(root, "me") as lease:
        lease.check()
    put_note(root, live_owner)
    with pytest.raises(UpstreamNotReadyError, match="another process"), hold_lease(root, "me"):
        pass


def test_a_lease_of_another_machine_lapses(store: FakeStore, root: Storage) -> None:
    put_note(root, None)
    with pytest.raises(UpstreamNotReadyError), hold_lease(root, "me"):
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
    monkeypatch.setattr(lease_module, "RENEWAL_S", 0.01)
    with hold_lease(root, "me") as lease:
        puts = lambda: sum(line.startswith("put") for line in store.log)  # noqa: E731
        end = time.monotonic() + 120
        while puts() < 4 and time.monotonic() < end:
            time.sleep(0.01)
        assert puts() >= 4
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
