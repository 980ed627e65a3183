"""Two real processes on the loopback device train as one would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.run import read_json, resolve_run
from tests.training.worker_cluster import find_run, losses, run, run_alone
from training.checkpoint.restore import load_run
from training.monitoring.run_logs import read_history

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def test_two_workers_train_what_one_process_does_and_the_chief_alone_writes(
    tiny_version: Path, tmp_path: Path
) -> None:
    # With a smaller epsilon Adam enlarges how sums round where a gradient is nearly 0.
    changes = {"optimizer": {"epsilon": 1e-4}}
    alone = run_alone(tiny_version, tmp_path / "one", changes)
    ended = run(tiny_version, tmp_path / "two", changes=changes)
    assert [worker.code for worker in ended] == [0, 0], ended
    assert len(losses(tmp_path / "two")) == 24
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    for mine, theirs in zip(alone, ended[0].weights, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-6)
    found = find_run(tmp_path / "two")
    check_keys(find_run(tmp_path / "one"), found)
    assert not (tmp_path / "two" / "1").exists()
    assert resolve_run(str(tmp_path / "two" / "0" / "t")) == found
    card = read_json(found / "run_card.json")
    assert card["status"] == "trained"
    devices = card["devices"]
    assert (devices["strategy"], devices["workers"], devices["replicas"]) == ("multi_worker", 2, 2)
    assert (devices["batch_size"], devices["rows_per_replica"]) == (64, 32)


def check_keys(one: Path, two: Path) -> None:
    """They get and lose rows as in one process."""
    alone, together = (load_run(found, "last").model.tables["user_id"] for found in (one, two))
    states = [table.keys.state_tensors() for table in (alone, together)]
    for name, mine in states[0].items():
        np.testing.assert_array_equal(mine, states[1][name], err_msg=name)
    assert {"counts", "steps", "waiting", "moment"} <= set(states[0])
    np.testing.assert_allclose(together.rows.numpy(), alone.rows.numpy(), rtol=1e-4, atol=1e-6)
    history = read_history(two)
    for count in ("admitted", "evicted", "rejected"):
        assert history[0].tables["user_id"][count] > 0, count
