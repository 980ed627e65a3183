from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.dataset import read_manifest
from conf.errors import ConfigError, InputDataError, SluiceError, UpstreamNotReadyError
from conf.run import read_json
from conf.training import (
    DSSMConfig,
    FitConfig,
    MFConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    WarmStartConfig,
)
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from tests.training.killed_run import CONFIG, Silent
from training.checkpoint import restore_model
from training.checkpoint.shelf import list_entries
from training.fit import fit_run, plan_run
from training.row_matching import match_rows, read_encoded_version
from training.trainer import Trainer, TrainingData

MODELS = {
    "dssm": DSSMConfig(embedding_dim=4, user_hidden_units=(8,)),
    "mf": MFConfig(embedding_dim=4),
}
STEADY = OptimizerConfig(learning_rate=0.01)


def configure(
    version: Path, root: Path, model: ModelConfig, warm: dict[str, Any] | None = None, **changes
) -> TrainConfig:
    fit = FitConfig(epochs=1, early_stopping=None, warm_start=warm)
    updates = {"dataset": str(version), "root": str(root), "model": model, "fit": fit}
    return CONFIG.model_copy(update={**updates, "optimizer": STEADY, **changes})


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def old_run(model, tiny_version: Path, tmp_path_factory) -> Path:
    return fit_run(configure(tiny_version, tmp_path_factory.mktemp("old"), model), Silent())


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    """More users and items, of other frequencies: nearly every token has another id."""
    config = TinyConfig(users=70, items=55, seed=5)
    return write_tiny_dataset(tmp_path_factory.mktemp("grown"), config=config)


def build(config: TrainConfig) -> Trainer:
    version = Path(config.dataset)
    data = TrainingData(version, read_manifest(version))
    return Trainer(config, data, tf.distribute.get_strategy(), Silent())


def all_values(trainer: Trainer) -> list[np.ndarray]:
    optimizers = trainer._optimizers
    variables = [*trainer.model.trainable_variables, *optimizers.sparse.variables]
    if optimizers.dense is not None:
        variables += optimizers.dense.variables
    return [np.asarray(variable.numpy()) for variable in variables]


@pytest.mark.parametrize("moments", ["reset", "transfer"])
def test_rows_and_moments_follow_their_tokens(
    model, moments: str, old_run: Path, grown: Path, tmp_path: Path
) -> None:
    warm = {"path": str(old_run), "moments": moments}
    trainer = build(configure(grown, tmp_path, model, warm, seed=9))
    fresh = build(configure(grown, tmp_path, model, seed=9))
    before = build(configure(read_dataset(old_run), tmp_path, model))
    last = list_entries(old_run / "checkpoints" / "last")[-1].path
    reader = tf.train.load_checkpoint(str(last / "state"))
    report = trainer.warm_start()
    assert report is not None
    old_version = before._data
    versions = [
        read_encoded_version(data.version_dir, data.manifest)
        for data in (trainer._data, old_version)
    ]
    old_model = restore_model(old_run, "last")[0]
    order = sorted(trainer.model.tables)
    for name, table in trainer.model.tables.items():
        rows = match_rows(trainer.model.id_spaces[name], *versions)
        assert rows is not None
        known = rows >= 0
        assert report.rows[name] == {"rows": len(rows), "transferred": known.sum()}
        old_rows = old_model.tables[name].rows.numpy()
        np.testing.assert_array_equal(table.rows.numpy()[known], old_rows[rows[known]])
        np.testing.assert_array_equal(
            table.rows.numpy()[~known], fresh.model.tables[name].rows.numpy()[~known]
        )
        slot = order.index(name)
        moment = trainer._optimizers.sparse.slots["first_moment"][slot].numpy()
        old_moment = reader.get_tensor(f"optimizers/sparse/slots/first_moment/{slot}")
        expected = np.zeros_like(moment)
        if moments == "transfer":
            expected[known] = old_moment[rows[known]]
            assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(moment, expected)
    assert 0 < report.rows["user_id"]["transferred"] < report.rows["user_id"]["rows"]
    for a, b in zip(trainer.model.dense_variables, old_model.dense_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    steps = reader.get_tensor("optimizers/sparse/iterations")
    assert int(trainer._optimizers.step.numpy()) == (steps if moments == "transfer" else 0)
    if trainer._optimizers.dense is not None:
        found = int(trainer._optimizers.dense.iterations.numpy())
        assert found == (steps if moments == "transfer" else 0)
    assert report.fresh == {}


def read_dataset(run: Path) -> Path:
    return Path(read_json(run / "run_card.json")["dataset"]["path"])


def test_a_run_starts_warm_and_says_so(model, old_run: Path, grown: Path, tmp_path: Path) -> None:
    # The series stands for its last finished run, and a plain string for the path.
    warm = FitConfig.model_validate({"warm_start": str(old_run.parent.parent)}).warm_start
    assert warm == WarmStartConfig(path=str(old_run.parent.parent))
    config = configure(grown, tmp_path, model, warm)
    plan = plan_run(config)
    assert plan["warm_start"]["rows"]["movie_id"]["transferred"] > 30
    run = fit_run(config, Silent())
    report = read_json(run / "warm_start.json")
    assert report["source"].startswith(str(old_run / "checkpoints" / "best"))
    assert report["rows"] == plan["warm_start"]["rows"]
    assert read_json(run / "run_card.json")["status"] == "trained"


def test_a_checkpoint_by_its_own_path(old_run: Path, grown: Path, model, tmp_path: Path) -> None:
    path = list_entries(old_run / "checkpoints" / "last")[-1].path
    report = build(configure(grown, tmp_path, model, {"path": str(path)})).warm_start()
    assert report is not None
    assert report.source == str(path)
    assert "movie_id" in report.render()


def refuse(config: TrainConfig, kind: type[SluiceError], match: str) -> None:
    """Refused before there is a run directory, and before anything is set."""
    trainer = build(config)
    before = all_values(trainer)
    with pytest.raises(kind, match=match):
        trainer.warm_start()
    for a, b in zip(all_values(trainer), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(kind, match=match):
        fit_run(config, Silent())
    assert not (Path(config.root) / "t").exists()


@pytest.fixture(scope="module")
def dssm_run(tiny_version: Path, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("dssm")
    return fit_run(configure(tiny_version, root, MODELS["dssm"]), Silent())


def test_other_shapes_are_refused_or_begin_fresh(dssm_run: Path, grown: Path, tmp_path) -> None:
    wider = DSSMConfig(embedding_dim=4, user_hidden_units=(16,))
    warm = {"path": str(dssm_run), "moments": "transfer"}
    refuse(
        configure(grown, tmp_path, wider, warm), ConfigError, r"\[12, 8\] there, \[12, 16\] here"
    )
    longer = DSSMConfig(embedding_dim=6)
    refuse(configure(grown, tmp_path, longer, warm), ConfigError, r"\[42, 4\] there, \[57, 6\]")
    trainer = build(configure(grown, tmp_path, wider, {**warm, "mismatched": "fresh"}))
    report = trainer.warm_start()
    assert report is not None
    assert set(report.rows) == set(trainer.model.tables)
    assert any("[12, 8]" in why for why in report.fresh.values())
    assert report.dense  # the weights behind it, of the same shape, and those of the items


def test_moments_and_a_schedule_are_refused(dssm_run: Path, grown: Path, tmp_path: Path) -> None:
    warm = {"path": str(dssm_run), "moments": "transfer"}
    cosine = OptimizerConfig(schedule="cosine")
    config = configure(grown, tmp_path, MODELS["dssm"], warm, optimizer=cosine)
    refuse(config, ConfigError, "schedule")


def test_what_is_not_there_or_damaged_is_refused(
    dssm_run: Path, grown: Path, tmp_path: Path
) -> None:
    def start_from(path: Path) -> TrainConfig:
        return configure(grown, tmp_path / "root", MODELS["dssm"], {"path": str(path)})

    refuse(start_from(tmp_path / "nowhere"), UpstreamNotReadyError, "finished training run")
    copy = tmp_path / "copy"
    shutil.copytree(dssm_run, copy)
    (newest,) = list_entries(copy / "checkpoints" / "best")
    (newest.path / "state.index").write_bytes(b"")
    refuse(start_from(copy), InputDataError, "damaged")
    shutil.rmtree(copy / "checkpoints")
    refuse(start_from(copy), UpstreamNotReadyError, "no checkpoint yet")


def test_a_version_that_is_gone_leaves_rows_without_tokens(
    grown: Path, tiny_version: Path, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    shutil.copytree(tiny_version, version)
    run = fit_run(configure(version, tmp_path / "first", MODELS["mf"]), Silent())
    shutil.rmtree(version)
    config = configure(grown, tmp_path / "second", MODELS["mf"], {"path": str(run)})
    refuse(config, InputDataError, "no row has a token")
