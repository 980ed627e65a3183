from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError, SluiceError, UpstreamNotReadyError
from conf.training.models import DSSMConfig, MFConfig, ModelConfig, RankingConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.tables import DynamicTableConfig
from conf.training.train import FitConfig, TrainConfig
from jobs.inspection.variables import summarize_key
from tests.training.dynamic_runs import build_trainer, read_state
from tests.training.killed_run import CONFIG
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.checkpoint_files import CheckpointLayout, list_checkpoints
from training.checkpoint.restore import load_run
from training.checkpoint.saved_tensors import TrainingState
from training.embedding.dynamic_table import DynamicTable, fill_like
from training.embedding.key_index import SAVED_KEYS
from training.embedding.key_space import KeySpace
from training.embedding.table_files import write_tables
from training.encoders.vocabularies import match_keys, match_rows, read_encoded_version
from training.fit import fit_run
from training.loop import warm_start
from training.loop.trainer import Trainer
from training.loop.warm_start import (
    MatchedKeys,
    SlotMap,
    WarmTarget,
    map_slots,
    match_dynamic_table,
    read_table_files,
    set_keys,
)
from training.monitoring.progress import TrainingProgress

SPARSE, DENSE = "optimizers/sparse/accumulators", "optimizers/dense/_momentums"
STEPS = "optimizers/sparse/iterations"
LAYOUT = CheckpointLayout({"a": "model/a", "b": "model/b"}, ("model/v", "model/w"))
SHAPES = {
    "model/a": [5, 2],
    "model/b": [7, 2],
    "model/v": [3],
    "model/w": [2, 2],
    f"{SPARSE}/0": [5, 1],
    f"{SPARSE}/1": [7, 1],
    f"{DENSE}/0": [3],
    f"{DENSE}/1": [2, 2],
    STEPS: [],
    "optimizers/dense/_learning_rate": [],
}


def pair(old_shapes, old: CheckpointLayout, **more: list[int]):
    """Slots by name, and the names of those without an earlier one."""
    new = {
        name: tf.Variable(tf.zeros(shape, tf.int64 if name == STEPS else tf.float32))
        for name, shape in {**SHAPES, **more}.items()
    }
    fresh: dict[str, str] = {}
    found = map_slots((TrainingState(new, {}), LAYOUT), (old_shapes, old), fresh)
    return {slot.name: slot for slot in found}, set(fresh)


def test_slots_follow_their_weights_and_counters_come_along() -> None:
    old = CheckpointLayout({"x": "model/x", "b": "model/b", "a": "model/a"}, ("model/w", "model/v"))
    found, fresh = pair({**SHAPES, f"{SPARSE}/2": [4, 1]}, old)
    assert found == {
        f"{SPARSE}/0": SlotMap(f"{SPARSE}/0", f"{SPARSE}/2", "a"),
        f"{SPARSE}/1": SlotMap(f"{SPARSE}/1", f"{SPARSE}/1", "b"),
        f"{DENSE}/0": SlotMap(f"{DENSE}/0", f"{DENSE}/1", None),
        f"{DENSE}/1": SlotMap(f"{DENSE}/1", f"{DENSE}/0", None),
        STEPS: SlotMap(STEPS, STEPS, None),
    }
    assert fresh == set()  # the rate is of the new config


EARLIER = np.array([-1, 40, 7])


def build(**keys: Any) -> tuple[Any, DynamicTable]:
    table = DynamicTable("items", KeySpace("items", DynamicTableConfig(**keys)), 3, seed=1)
    bias = DynamicTable("bias", table.keys, 1, seed=1, initializer=None)
    tables = {"items": table, "bias": bias}
    model = SimpleNamespace(embedded_features={"movie_id": table}, tables=tables)
    return model, table


def test_tokens_that_are_gone_stay_behind(tiny_version: Path, tmp_path: Path) -> None:
    old = read_encoded_version(tiny_version, read_manifest(tiny_version))
    small = write_tiny_dataset(tmp_path, config=TinyConfig(items=8))
    new = read_encoded_version(small, read_manifest(small))
    model, table = build()
    earlier = np.arange(1, 42)  # null, and all items
    for of_same_keys in (table, model.tables["bias"]):
        found = match_dynamic_table(model, of_same_keys, {SAVED_KEYS: earlier}, (new, old))
        assert sorted(found.keys) == list(range(1, 10))
        assert len(found.rows) == 2 + 9
        assert found.rows[2] == 2  # that of null


def test_rows_of_keys_start_as_if_training_had_met_them() -> None:
    model, table = build(capacity=1)
    slot = fill_like(table.rows, 0.5, "slot")
    set_keys(model, table.keys, MatchedKeys(EARLIER, np.arange(5)))
    np.testing.assert_array_equal(table.rows.numpy()[2:], table.draw_rows(EARLIER))
    assert not table.rows.numpy()[:2].any()
    assert model.tables["bias"].rows.numpy().shape == (5, 1)
    np.testing.assert_array_equal(slot.numpy(), np.full((5, 3), 0.5))


TOWERS = DSSMConfig(embedding_dim=4, user_hidden_units=(8,))
STEADY = OptimizerConfig(learning_rate=0.01)


def configure(
    version: Path, root: Path, model: ModelConfig, warm: dict[str, Any] | None = None, **changes
) -> TrainConfig:
    fit = FitConfig(epochs=1, early_stopping=None, warm_start=warm)
    updates = {"dataset": str(version), "root": str(root), "model": model, "fit": fit}
    return CONFIG.model_copy(update={**updates, "optimizer": STEADY, **changes})


@pytest.fixture(scope="module")
def towers_run(tiny_version: Path, tmp_path_factory) -> Path:
    return fit_run(
        configure(tiny_version, tmp_path_factory.mktemp("old"), TOWERS), TrainingProgress()
    )


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    """More users and items, of other frequencies: nearly every token has another id."""
    config = TinyConfig(users=70, items=55, seed=5)
    return write_tiny_dataset(tmp_path_factory.mktemp("grown"), config=config)


def warm_start_build(config: TrainConfig) -> Trainer:
    return build_trainer(config, Path(config.dataset))


@pytest.mark.parametrize(
    ("model", "moments"),
    [(TOWERS, "reset"), (TOWERS, "transfer"), (MFConfig(embedding_dim=4), "transfer")],
)
def test_rows_and_moments_follow_their_tokens(
    model, moments: str, towers_run: Path, tiny_version: Path, grown: Path, tmp_path: Path
) -> None:
    old_run = towers_run
    if model is not TOWERS:
        old_run = fit_run(configure(tiny_version, tmp_path / "old", model), TrainingProgress())
    warm = {"path": str(old_run), "moments": moments}
    trainer = warm_start_build(configure(grown, tmp_path, model, warm, seed=9))
    fresh = warm_start_build(configure(grown, tmp_path, model, seed=9))
    last = list_checkpoints(old_run / "checkpoints" / "last")[-1].path
    reader = tf.train.load_checkpoint(str(last / "state"))
    report = trainer.warm_start()
    versions = [read_encoded_version(v, read_manifest(v)) for v in (grown, tiny_version)]
    old_model, model = load_run(old_run, "last").model, trainer.parts.model
    order = sorted(model.tables)
    for name, table in model.tables.items():
        rows = match_rows(model.id_spaces[name], *versions)
        known = rows >= 0
        assert report.rows[name] == {"rows": len(rows), "transferred": known.sum()}
        old_rows = old_model.tables[name].rows.numpy()
        np.testing.assert_array_equal(table.rows.numpy()[known], old_rows[rows[known]])
        np.testing.assert_array_equal(
            table.rows.numpy()[~known], fresh.parts.model.tables[name].rows.numpy()[~known]
        )
        slot = order.index(name)
        moment = trainer.parts.optimizers.sparse.slots["first_moment"][slot].numpy()
        old_moment = reader.get_tensor(f"optimizers/sparse/slots/first_moment/{slot}")
        expected = np.zeros_like(moment)
        if moments == "transfer":
            expected[known] = old_moment[rows[known]]
            assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(moment, expected)
    assert 0 < report.rows["user_id"]["transferred"] < report.rows["user_id"]["rows"]
    for a, b in zip(model.dense_variables, old_model.dense_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    optimizers = trainer.parts.optimizers
    for counted in filter(None, (optimizers.sparse, optimizers.dense)):
        steps = reader.get_tensor(STEPS) if moments == "transfer" else 0
        assert int(counted.iterations.numpy()) == steps
    assert report.fresh == {}


def test_moving_statistics_come_over(tiny_version: Path, grown: Path, tmp_path: Path) -> None:
    params = {"hidden_units": [4], "batch_normalization": True}
    ranking = RankingConfig(embedding_dim=4, network="wide_deep", params=params)
    old = fit_run(configure(tiny_version, tmp_path / "old", ranking), TrainingProgress())
    trainer = warm_start_build(configure(grown, tmp_path, ranking, {"path": str(old)}))
    report = trainer.warm_start()
    earlier = load_run(old, "best").model.networks[0].weights
    found = {n: v for n, v in trainer.parts.model.networks[0].weights.items() if "moving" in n}
    assert len(found) == 2
    for name, variable in found.items():
        np.testing.assert_array_equal(variable, earlier[name].numpy())
        assert any(name in known for known in report.dense)
    assert np.abs(found["batch_normalization/moving_mean"]).max() > 0


# Each user has 13 rows, of which the epoch's tail leaves some out: those users wait.
RULES = {"admission": {"count": 13}}
RULED = DSSMConfig.model_validate(
    {"embedding_dim": 4, "embeddings": {"user_id": RULES, "gender": RULES}}
)


@pytest.fixture(scope="module")
def ruled_run(tiny_version: Path, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ruled")
    return fit_run(configure(tiny_version, root, RULED), TrainingProgress())


def test_a_key_can_be_asked_for(ruled_run: Path) -> None:
    model = load_run(ruled_run).model
    table, keys = model.tables["user_id"], model.tables["user_id"].keys
    rows = {int(key): row for row, key in enumerate(keys.read_keys(), start=2) if key}
    for key in (2, 22, 42, 1 << 60):
        found = summarize_key(ruled_run, "user_id", key)
        assert found["row"] == rows.get(key)
        if key < 1 << 60:
            assert found["now"] - found["last_seen"] == found["unused"] >= 0
            assert found["occurrences"] == keys.index.read_key(key)[1]
        if key in rows:
            np.testing.assert_array_equal(found["values"], table.rows.numpy()[rows[key]])
    static = summarize_key(ruled_run, "movie_id", 5)
    np.testing.assert_array_equal(static["values"], model.tables["movie_id"].rows.numpy()[5])
    with pytest.raises(ConfigError, match="no such table"):
        summarize_key(ruled_run, "users", 5)


def test_keys_under_rules_keep_their_counts_and_ages(
    tiny_version: Path, grown: Path, ruled_run: Path, tmp_path: Path
) -> None:
    before = load_run(ruled_run, "last").model.tables["user_id"]
    trainer = warm_start_build(configure(grown, tmp_path, RULED, {"path": str(ruled_run)}))
    trainer.warm_start()
    table = trainer.parts.model.tables["user_id"]
    old, new = before.keys, table.keys
    versions = [read_encoded_version(v, read_manifest(v)) for v in (grown, tiny_version)]
    known = np.arange(2, 62)
    states = set()
    for key, same in zip(known, match_keys("user_id", known, *versions), strict=True):
        row, count, step = old.index.read_key(int(key))
        found = new.index.read_key(int(same))
        # Steps are counted from the start of the new run.
        assert found[1:] == (count, step - old.moment)
        assert (found[0] > 1) == (row > 1)
        states.add(row > 1)
    assert states == {False, True}
    assert new.moment == 0
    kept = np.flatnonzero(old.read_keys())
    np.testing.assert_array_equal(table.rows.numpy()[2:], before.rows.numpy()[2:][kept])
    old.set_keys(np.array([5, 6]))  # keys of a table without rules have qualified
    assert old.index.read_key(5) == (2, 13, 0)


def test_tables_start_from_files(ruled_run: Path, tiny_version: Path, tmp_path: Path) -> None:
    earlier, directory = load_run(ruled_run).model, tmp_path / "tables"
    write_tables(directory, {n: table.read_by_key() for n, table in earlier.tables.items()})
    files = {"user_id": str(directory / "user_id.txt"), "gender": str(directory / "gender.parquet"),
             "movie_id": str(directory / "movie_id.parquet")}  # fmt: skip
    warm = {"tables": files}
    trainer = warm_start_build(configure(tiny_version, tmp_path, RULED, warm, optimizer=FTRL))
    fresh = warm_start_build(configure(tiny_version, tmp_path, RULED))
    report, model = trainer.warm_start(), trainer.parts.model
    assert (report.source, report.files) == (None, files)
    ids = tf.range(1, 42, dtype=tf.int64)
    wanted = {name: earlier.tables[name].lookup(ids).numpy() for name in files}
    for name, rows in wanted.items():
        found, error = model.tables[name].lookup(ids), 2e-8 if name == "user_id" else 0.0
        np.testing.assert_allclose(found, rows, rtol=0, atol=error)
    assert 0 < report.rows["user_id"]["transferred"] < 60  # the others waited
    index = model.tables["user_id"].keys.index
    assert index.read_key(int((directory / "user_id.txt").read_text().split("\t")[0]))[1] == 13
    for mine, theirs in zip(model.dense_variables, fresh.parts.model.dense_variables, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert "user_id.txt" in report.render()
    apply_zeros(trainer)
    for name, rows in wanted.items():
        np.testing.assert_allclose(model.tables[name].lookup(ids), rows, rtol=1e-4, atol=1e-6)


FTRL = OptimizerConfig.model_validate(
    {
        "warmup_steps": 50,  # The first step has a fiftieth of the rate.
        "sparse": {"kind": "ftrl", "l1": 0.01, "l2": 0.02},
        "dense": {"kind": "ftrl", "l1_regularization_strength": 0.01, "beta": 0.1},
    }
)


def apply_zeros(trainer: Trainer) -> None:
    """A step whose loss does not move: FTRL computes all weights of its sums."""
    optimizers = trainer.parts.optimizers
    zeros = [
        tf.IndexedSlices(tf.zeros_like(v), tf.range(tf.shape(v, tf.int64)[0]), tf.shape(v))
        for v in trainer.parts.model.table_variables
    ]
    optimizers.apply([*zeros, *(tf.zeros_like(v) for v in trainer.parts.model.dense_variables)])


def test_ftrl_keeps_weights_that_came_without_moments(
    towers_run: Path, grown: Path, tmp_path: Path
) -> None:
    warm = {"path": str(towers_run)}
    trainer = warm_start_build(configure(grown, tmp_path, TOWERS, warm, optimizer=FTRL))
    report, model = trainer.warm_start(), trainer.parts.model
    before = {name: table.rows.numpy().copy() for name, table in model.tables.items()}
    dense = [variable.numpy() for variable in model.dense_variables]
    apply_zeros(trainer)
    for name, table in model.tables.items():
        kept = np.isclose(table.rows.numpy(), before[name], rtol=1e-4, atol=1e-6).all(axis=1)
        assert report.rows[name]["transferred"] <= kept.sum()
    assert dense
    for variable, wanted in zip(model.dense_variables, dense, strict=True):
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-4, atol=1e-6)


def test_files_stand_beside_a_run(ruled_run: Path, tiny_version: Path, tmp_path: Path) -> None:
    key, file = 1 << 60, tmp_path / "users.txt"
    file.write_text(f"{key}\t1,2,3,4\n")
    warm = {"path": str(ruled_run), "moments": "transfer", "tables": {"user_id": str(file)}}
    trainer = warm_start_build(configure(tiny_version, tmp_path, RULED, warm))
    report = trainer.warm_start()
    assert report.source is not None
    assert report.rows["user_id"] == {"rows": 3, "transferred": 1}
    earlier, keys = load_run(ruled_run).model, tf.range(62, dtype=tf.int64)
    found = trainer.parts.model.tables["user_id"].lookup(tf.concat([keys, [key]], 0)).numpy()
    np.testing.assert_array_equal(found, [[0.0] * 4] * 62 + [[1.0, 2.0, 3.0, 4.0]])
    gender = [
        model.tables["gender"].lookup(keys[:4]).numpy() for model in (trainer.parts.model, earlier)
    ]
    np.testing.assert_array_equal(*gender)
    moments = trainer.parts.optimizers.sparse.slots["first_moment"]
    slots = dict(zip(sorted(trainer.parts.model.tables), moments, strict=True))
    assert not slots["user_id"].numpy().any()  # those of the file's keys start anew
    assert slots["gender"].numpy().any()


def test_files_that_do_not_fit_are_refused(ruled_run: Path, tmp_path: Path) -> None:
    model, file = load_run(ruled_run).model, tmp_path / "rows.txt"
    model.tables["user_id"].keys.max_rows = 1
    for table, key, kind, match in (
        ("users", 5, ConfigError, "(?s)does not have.*user_id"),
        ("movie_id", 99, InputDataError, "the vocabulary of table movie_id"),
        ("user_id", 5, ConfigError, "more keys than table user_id"),
    ):
        file.write_text(f"{key}\t1,2,3,4\n6\t1,2,3,4\n")
        with pytest.raises(kind) as caught:
            read_table_files(model, {table: str(file)})
        assert re.search(match, caught.value.render())


def refuse(config: TrainConfig, kind: type[SluiceError], match: str) -> None:
    """Refused before there is a run directory, and before anything is set."""
    trainer = warm_start_build(config)
    before = read_state(trainer)
    with pytest.raises(kind, match=match):
        trainer.warm_start()
    for name, value in read_state(trainer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    with pytest.raises(kind, match=match):
        fit_run(config, TrainingProgress())
    assert not (Path(config.root) / "t").exists()


def test_other_shapes_are_refused_or_begin_fresh(towers_run: Path, grown: Path, tmp_path) -> None:
    wider = DSSMConfig(embedding_dim=4, user_hidden_units=(16,))
    warm = {"path": str(towers_run), "moments": "transfer"}
    refuse(
        configure(grown, tmp_path, wider, warm), ConfigError, r"\[12, 8\] there, \[12, 16\] here"
    )
    longer = DSSMConfig(embedding_dim=6)
    refuse(configure(grown, tmp_path, longer, warm), ConfigError, r"\[42, 4\] there, \[57, 6\]")
    trainer = warm_start_build(configure(grown, tmp_path, wider, {**warm, "mismatched": "fresh"}))
    report = trainer.warm_start()
    assert set(report.rows) == set(trainer.parts.model.tables)
    assert any("[12, 8]" in why for why in report.fresh.values())
    assert report.dense  # the weights behind it, of the same shape, and those of the items


def test_inputs_in_another_order_are_refused(
    towers_run: Path, tiny_version: Path, tmp_path: Path
) -> None:
    by_role = read_manifest(tiny_version).schema.by_role
    warm = {"path": str(towers_run)}
    for role in ("user", "item"):
        names = tuple(spec.name for spec in by_role(role))
        same, turned = (
            TOWERS.model_copy(update={f"{role}_features": order}) for order in (names, names[::-1])
        )
        assert warm_start_build(configure(tiny_version, tmp_path, same, warm)).warm_start().dense
        refuse(configure(tiny_version, tmp_path, turned, warm), ConfigError, "in another order")


def one_of_two(said: str, *, other_fails: bool = False) -> Any:
    """Stands for the second worker of two, whose chief's checkpoint says something."""
    return SimpleNamespace(share=lambda decide: said, any=lambda flag: flag or other_fails)


def test_workers_with_tables_in_parts_start_from_one_checkpoint(
    towers_run: Path, grown: Path, tmp_path: Path
) -> None:
    (newest,) = list_checkpoints(towers_run / "checkpoints" / "best")
    said = (newest.path / "checkpoint.json").read_text()
    config = configure(grown, tmp_path, TOWERS, {"path": str(towers_run)})
    built = warm_start_build(config)
    target = WarmTarget(built.parts.model, built.parts.optimizers, built.parts.plan.data)
    report = warm_start._transfer_each(config, target, one_of_two(said))
    assert report.source == str(newest.path)
    with pytest.raises(InputDataError, match="another checkpoint on another worker"):
        warm_start._transfer_each(config, target, one_of_two(said + " "))
    with pytest.raises(InputDataError, match="another worker cannot start"):
        warm_start._transfer_each(config, target, one_of_two(said, other_fails=True))
    gone = configure(grown, tmp_path, TOWERS, {"path": str(tmp_path / "nowhere")})
    with pytest.raises(UpstreamNotReadyError, match="finished training run"):
        warm_start._transfer_each(gone, target, one_of_two(said))


def test_what_does_not_fit_is_refused_before_anything_is_set(
    towers_run: Path, grown: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(towers_run, copy)
    (newest,) = list_checkpoints(copy / "checkpoints" / "best")
    shutil.copytree(newest.path, tmp_path / "alone")
    (newest.path / "state.index").write_bytes(b"")
    cosine = {"optimizer": OptimizerConfig(schedule="cosine")}
    rmsprop = {"optimizer": OptimizerConfig.model_validate({"dense": {"kind": "rmsprop"}})}
    moments = {"path": str(towers_run), "moments": "transfer"}
    for kind, match, warm, changes in (
        (UpstreamNotReadyError, "finished training run", {"path": str(tmp_path / "nowhere")}, {}),
        (InputDataError, "damaged", {"path": str(copy)}, {}),
        (InputDataError, "inside its run", {"path": str(tmp_path / "alone")}, {}),
        (ConfigError, "schedule", moments, cosine),
        (ConfigError, "not those of these", moments, rmsprop),
    ):
        config = configure(grown, tmp_path / "root", TOWERS, warm).model_copy(update=changes)
        refuse(config, kind, match)
