from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.training.tables import NormalConfig
from tests.training import dynamic_replicas, dynamic_runs
from tests.training.dynamic_runs import (
    DSSM,
    FIT,
    build_config,
    build_ruled_config,
    build_trainer,
    read_state,
)
from tests.training.loop.test_trainer import Messages
from tests.training.processes import start_forked
from tests.training.tiny_dataset import TinyConfig, hash_key, write_tiny_dataset
from training.checkpoint.checkpoint_files import Position
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_space import KeySpace
from training.loop.trainer import Trainer
from training.monitoring.run_logs import read_steps
from training.reader.shards import InputCounts

STEPS = 12


@pytest.fixture(scope="module")
def version(tmp_path_factory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("keyed"), config=TinyConfig(keyed=True))


def steps_of(run: Path) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_steps(run)]


@pytest.fixture(scope="module")
def whole(version: Path, tmp_path_factory):
    """A run that nothing interrupts, and its trainer."""
    run = tmp_path_factory.mktemp("whole")
    trainer = build_trainer(build_config(DSSM), version)
    trainer.fit(run, None)
    return run, trainer


def resume_and_compare(trainer: Trainer, run: Path, expected) -> None:
    assert 0 < len(steps_of(run)) < len(steps_of(expected[0]))
    trainer.fit(run, None)
    assert steps_of(run) == steps_of(expected[0])
    state, whole = read_state(trainer), read_state(expected[1])
    assert set(state) == set(whole)
    for name, values in whole.items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)


def test_learns_rows_for_the_keys_of_the_train_split(version: Path, whole) -> None:
    state = read_state(whole[1])
    keys = state["model/tables/user_id/keys/by_row"]
    assert sorted(keys) == sorted(hash_key(1000 + user) for user in range(60))
    items = state["model/tables/items/keys/by_row"]
    assert set(items) <= {hash_key(100 + item) for item in range(40)}
    assert state["model/tables/items/rows"].shape == (2 + len(items), 4)
    shapes = {values.shape for name, values in state.items() if "slots/first_moment" in name}
    assert {(2 + len(items), 4), (2 + len(keys), 4)} <= shapes


# In a compiled call, right after a checkpoint, in the second epoch.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("epoch", "step"), [(1, 5), (1, 7), (2, 4)])
def test_sigkill_changes_neither_losses_nor_numbering(
    epoch: int, step: int, version: Path, whole, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    process = start_forked(dynamic_runs.train_and_die, str(version), str(run), epoch, step)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resume_and_compare(build_trainer(build_config(DSSM), version), run, whole)


def test_a_checkpoint_holds_the_keys_of_its_steps_alone(version: Path, tmp_path: Path) -> None:
    config = build_config(DSSM, fit=FIT.model_copy(update={"epochs": 1}))
    build_trainer(config, version).fit(tmp_path, None)
    trainer = build_trainer(config, version)
    met: list[int] = []
    space = trainer.parts.model.tables["items"].keys
    counts = {}
    for number, batch in enumerate(
        trainer.parts.epoch_input.build_dataset(Position(0, 0), InputCounts()), start=1
    ):
        arrived = np.concatenate([batch["history"].numpy().ravel(), batch["movie_id"].numpy()])
        met += [key for key in dict.fromkeys(arrived.tolist()) if key and key not in met]
        counts[number] = len(met)
    assert space.row_count == 2  # nothing but a run adds keys
    for entry in sorted((tmp_path / "checkpoints" / "last").iterdir()):
        reader = tf.train.load_checkpoint(str(entry / "state"))
        keys = reader.get_tensor("model/tables/items/keys/by_row")
        position = json.loads((entry / "checkpoint.json").read_text())["resume_state"]["position"]
        done = position["batch"] or len(counts)
        assert keys.tolist() == met[: counts[done]]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"embeddings": {"a": {"features": ["history", "genres"]}}}, "different ways"),
        ({"embeddings": {"user_id": "dynamic"}}, "cannot read feature 'history'"),
        ({"objective": {"logq_correction": True}}, "without the logQ correction"),
        (
            {"objective": {"logq_correction": 0, "negatives": {"source": "uniform", "count": 3}}},
            "source: batch",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, error, version: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        build_trainer(build_config({**DSSM, **changes}), version)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ruled", "tiered"), [(False, False), (True, False), (True, True)])
def test_two_replicas_train_as_one_does(
    ruled: bool, tiered: bool, timed: Path, tmp_path: Path
) -> None:
    states = []
    for replicas in (1, 2):
        result = tmp_path / f"{replicas}.npz"
        # Rows in two tiers are compared with those of one device that holds all.
        process = start_forked(
            dynamic_replicas.train, str(timed), replicas, str(result), ruled,
            tiered and replicas == 2,
        )  # fmt: skip
        process.join()
        assert process.exitcode == 0
        states.append(np.load(result))
    one, two = states
    assert set(one) == set(two)
    for name in one:
        if "/keys/" in name:
            np.testing.assert_array_equal(two[name], one[name], err_msg=name)
        else:
            np.testing.assert_allclose(two[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def timed(tmp_path_factory) -> Path:
    config = TinyConfig(keyed=True, timed=True)
    return write_tiny_dataset(tmp_path_factory.mktemp("timed"), config=config)


@pytest.fixture(scope="module")
def ruled(timed: Path, tmp_path_factory):
    """A run whose tables have rules, which nothing interrupts; its trainer, and what it said."""
    run, told = tmp_path_factory.mktemp("ruled"), Messages()
    trainer = build_trainer(build_ruled_config(), timed, told)
    trainer.fit(run, None)
    return run, trainer, told.texts


def read_tables(run: Path) -> list[dict[str, dict[str, int]]]:
    return [entry["tables"] for entry in json.loads((run / "history.json").read_text())]


def test_what_happened_to_keys_is_in_the_history_and_the_log(ruled) -> None:
    run, trainer, lines = ruled
    first, second = read_tables(run)
    for found in (first["user_id"], second["items"], first["past"]):
        assert found["bytes"] > 0
    assert first["user_id"]["rejected"] >= 60  # first occurrences
    assert first["user_id"]["admitted"] - first["user_id"]["evicted"] == 60
    assert second["items"]["keys"] == 15
    assert second["items"]["admitted"] == second["items"]["evicted"] > 30
    assert any(line.startswith("table items, this epoch: keys 15,") for line in lines)
    events = list((run / "logs").glob("events.*"))
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events[0]))
        for value in event.summary.value
    }
    assert {"tables/items/evicted", "tables/user_id/rejected", "tables/past/bytes"} <= tags
    assert len(trainer.parts.model.tables["items"].keys.read_keys()) == 15


# Killed with rows in two tiers and resumed in one, and in one alone.
@pytest.mark.exhaustive
@pytest.mark.parametrize("tiered", [True, False])
def test_sigkill_changes_nothing_under_rules(
    tiered: bool, timed: Path, ruled, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    process = start_forked(dynamic_runs.train_and_die, str(timed), str(run), 2, 33, True, tiered)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resume_and_compare(build_trainer(build_ruled_config(), timed), run, ruled)
    found, expected = read_tables(run), read_tables(ruled[0])
    if not tiered:
        assert found == expected
    assert found[1] == expected[1]
    for table, counts in expected[0].items():
        assert {**found[0][table], **counts, "bytes": 0} == {**found[0][table], "bytes": 0}
        assert ("swapped" in found[0][table]) == tiered


def test_logq_counts_ids_of_a_vocabulary_whose_table_is_dynamic(
    tiny_version: Path, tmp_path: Path
) -> None:
    losses = []
    for kind in ("static", "dynamic"):
        model = {**DSSM, "objective": {}, "embeddings": {"movie_id": kind}}
        trainer = build_trainer(build_config(model), tiny_version)
        table = trainer.parts.model.tables["movie_id"]
        if kind == "static":
            # The same first rows in both.
            twin = DynamicTable(
                "movie_id", KeySpace("movie_id"), 4, seed=42, initializer=NormalConfig(stddev=0.05)
            )
            keys = np.arange(table.vocabulary_size)
            table.rows.assign(twin.draw_rows(keys) * (keys > 0)[:, np.newaxis])
        run = tmp_path / kind
        run.mkdir()
        trainer.fit(run, None)
        losses.append(steps_of(run))
    assert losses[0] == losses[1]
