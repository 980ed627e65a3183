"""Steps on a GPU, read from their graphs: each op has a kernel, and few numbers go to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.training.train import DevicesConfig, TrainConfig
from tests.jobs.runs import write_tiny_run
from tests.training.dynamic_runs import RULED, TABLES, TIERED
from tests.training.every_model import RANKING_MODELS, RETRIEVAL_MODELS
from tests.training.gpu_kernels import StepOps, list_unserved, pretend_gpu, read_step
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.checkpoint_files import Position
from training.checkpoint.restore import load_run
from training.distribution.strategy import build_run_steps, build_strategy
from training.export.saved_model import write_export
from training.loop.trainer import Trainer
from training.monitoring.progress import TrainingProgress
from training.reader.training_data import TrainingData

MODELS = {**RETRIEVAL_MODELS, **RANKING_MODELS}
PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
DSSM, DEEPFM = RETRIEVAL_MODELS["dssm"], RANKING_MODELS["deepfm"]
KEYS = {**DSSM, "objective": {"logq_correction": False}}
OTHERS: dict[str, dict[str, Any]] = {
    **{
        f"sparse {kind}": {"model": DSSM, "optimizer": {"sparse": {"kind": kind}}}
        for kind in ("sgd", "adagrad", "ftrl")
    },
    **{
        f"dense {kind}": {"model": DEEPFM, "optimizer": {"dense": {"kind": kind}}}
        for kind in ("sgd", "adagrad", "adamw", "ftrl", "rmsprop", "lamb")
    },
    "bfloat16": {"model": DEEPFM, "compute": {"mixed_precision": True}},
    "bfloat16 sasrec": {"model": MODELS["sasrec"], "compute": {"mixed_precision": True}},
    "clipped": {"model": DSSM, "optimizer": {"clip_norm": 1.0}},
    "in parts": {"model": DSSM, "optimizer": {"accumulate_steps": 2}},
    **{
        f"negatives {source}": {
            "model": {**DSSM, "objective": {"negatives": {"source": source, "count": 8}}}
        }
        for source in ("uniform", "frequency", "adaptive", "mixed")
    },
    "hardest": {"model": {**DSSM, "objective": {"negatives": {"hardest": 4}}}},
    "user items": {"model": {**DSSM, "objective": {"mask": "user_items"}}},
    **{kind: {"model": {**DSSM, "objective": {"kind": kind}}} for kind in ("softmax", "bpr")},
    "dense table": {
        "model": {**DSSM, "embeddings": {"user_id": {"kind": "static", "dense": True}}}
    },
    "dynamic": {"model": {**KEYS, "embeddings": TABLES}},
    "rules": {"model": {**KEYS, "embeddings": RULED}},
    "two tiers": {"model": {**KEYS, "embeddings": TIERED}},
}
OFTEN_MIRRORED = ("dssm", "sasrec", "deepfm")
KEYED = {"dynamic", "rules", "two tiers"}


def read_ops(version: Path, settings: dict[str, Any], replicas: int = 1) -> StepOps:
    """What the steps of a run do on one GPU, or on each of several."""
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    config = TrainConfig.model_validate(
        {"dataset": "t", "name": "t", "input": {"batch_size": 64}, **settings}
    )
    data = TrainingData(version, read_manifest(version))
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch)
        trainer = Trainer(config, data, strategy, TrainingProgress())
        with trainer.parts.epoch_input.open(Position(0, 0)) as batches:
            step = trainer.parts.run_steps.get_concrete_function(batches, tf.constant(2))
        return read_step(step.graph, has_host=replicas == 1)


def read_ceilings() -> dict[str, list[int]]:
    """The most launches, copies to the host and collectives of a step, as the page lists them."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- steps on a GPU -->")[2]
    lines = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): [int(number) for number in numbers] for name, *numbers in cells}


@pytest.fixture(scope="module")
def keyed_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(keyed=True, timed=True)
    return write_tiny_dataset(tmp_path_factory.mktemp("keyed"), config=config)


def assert_stays_on_the_device(found: StepOps) -> None:
    assert not found.without_kernel
    assert not found.of_batch


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_step_of_each_model_keeps_to_what_the_page_says(name: str, tiny_version: Path) -> None:
    found = read_ops(tiny_version, {"model": MODELS[name]})
    launches, copies, _ = read_ceilings()[name]
    assert_stays_on_the_device(found)
    assert found.launches <= launches
    assert sum(found.copies.values()) <= copies, found.copies


def test_the_page_names_each_model_once() -> None:
    assert sorted(read_ceilings()) == sorted(MODELS)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_table_optimizer_and_precision_has_kernels(
    name: str, tiny_version: Path, keyed_version: Path
) -> None:
    version = keyed_version if name in KEYED else tiny_version
    assert_stays_on_the_device(read_ops(version, OTHERS[name]))


@pytest.mark.parametrize(
    "name",
    [
        *OFTEN_MIRRORED,
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS if n not in OFTEN_MIRRORED),
    ],
)
def test_several_gpus_have_kernels_too(name: str, tiny_version: Path) -> None:
    found = read_ops(tiny_version, {"model": MODELS[name]}, replicas=2)
    assert_is_mirrored(found)
    assert found.collectives <= 2 * read_ceilings()[name][2]


@pytest.mark.parametrize("name", sorted(KEYED))
def test_dynamic_tables_on_several_gpus_have_kernels(name: str, keyed_version: Path) -> None:
    assert_is_mirrored(read_ops(keyed_version, OTHERS[name], replicas=2))


def assert_is_mirrored(found: StepOps) -> None:
    assert not found.of_batch
    # TensorFlow's own exchange of rows pads their numbers on the host.
    assert {op.partition(" ")[0] for op in found.without_kernel} <= {"Pad"}


@pytest.mark.parametrize(
    "name",
    ["gru", "deepfm", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS)],
)
def test_an_export_that_a_gpu_made_runs_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_tiny_run(tmp_path, MODELS[name])
    pretend_gpu(monkeypatch)
    assert list_unserved(write_export(load_run(run))) == set()


@pytest.mark.parametrize("name", ["sasrec", "deepfm", "youtube_dnn", "comirec"])
def test_the_branches_of_a_gpu_compute_the_same(name: str, tiny_version: Path) -> None:
    """They run here: XLA compiles for CPUs too, and batches need not be brought."""
    config = TrainConfig.model_validate(
        {
            "dataset": "t",
            "name": "t",
            "model": {**MODELS[name], **({"dropout": None} if name != "deepfm" else {})},
            "input": {"batch_size": 64},
            "optimizer": {"epsilon": 1e-3},
        }
    )
    data, losses = TrainingData(tiny_version, read_manifest(tiny_version)), []
    for pretends in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("training.loop.parts.compile_steps", build_run_steps)
            if pretends:
                pretend_gpu(patch)
            trainer = Trainer(config, data, tf.distribute.get_strategy(), TrainingProgress())
            with trainer.parts.epoch_input.open(Position(0, 0)) as batches:
                losses.append(trainer.parts.run_steps(batches, tf.constant(6)).losses.numpy())
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert len(set(losses[0])) == len(losses[0]) == 6


def test_what_has_no_kernel_or_goes_to_the_host_is_found() -> None:
    @tf.function(autograph=False)
    def steps(rows: tf.Tensor) -> tf.Tensor:
        def step(done: tf.Tensor) -> tf.Tensor:
            padded = tf.pad(rows, [[0, 1], [0, 0]], constant_values=tf.constant(7, tf.int64))
            met = tf.maximum(tf.cast(rows, tf.int32), 0)  # What is int32 lies on the host.
            return done + tf.size(padded) + tf.size(tf.unique(met[:, 0])[0])

        return tf.while_loop(lambda done: done < 2, step, [tf.constant(0)])

    found = read_step(steps.get_concrete_function(tf.TensorSpec([None, 3], tf.int64)).graph)
    assert [op.partition(" ")[0] for op in found.without_kernel] == ["PadV2"]
    assert "Maximum" in {op.partition(" ")[0] for op in found.of_batch}
    assert found.launches > 0
