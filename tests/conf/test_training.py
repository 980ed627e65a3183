from __future__ import annotations

import pytest

from conf.errors import ConfigError
from conf.load import load_config
from conf.training import (
    DSSMConfig,
    ExponentialSchedule,
    LinearSchedule,
    MFConfig,
    SampledSoftmaxConfig,
    SparseAdamConfig,
    SparseFTRLConfig,
    TrainConfig,
)

REQUIRED = ["dataset=d", "name=n"]


def load(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, "training", None, [*REQUIRED, *overrides])


def test_keys_without_a_tag_are_those_of_the_default() -> None:
    model = load("model.embedding_dim=4", "model.objective.uniform_negatives=64").model
    assert isinstance(model, DSSMConfig)
    assert model.embedding_dim == 4
    assert model.objective == SampledSoftmaxConfig(uniform_negatives=64)


def test_a_tag_that_is_given_decides() -> None:
    model = load("model.name=mf", "model.objective.kind=binary").model
    assert isinstance(model, MFConfig)
    assert model.objective.kind == "binary"


@pytest.mark.parametrize("override", ["model.embeding_dim=4", "model.objective.uniform_negative=1"])
def test_a_misspelt_key_without_a_tag_still_gets_a_hint(override: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load(override)


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=2147483648",
        "optimizer.learning_rate=.inf",
        "optimizer.epsilon=.nan",
        "model.temperature=.inf",
        "fit.log_every_seconds=.inf",
        "model.name=nope",
        "model=dssm",
    ],
)
def test_what_no_run_could_use_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(override)


def test_the_largest_seed_is_taken() -> None:
    assert load("seed=2147483647").seed == 2**31 - 1


def test_a_schedule_is_given_by_its_name_or_with_its_arguments() -> None:
    assert load("optimizer.schedule=linear").optimizer.schedule == LinearSchedule()
    decay = load("optimizer.schedule={kind: exponential, decay_rate: 0.5, decay_steps: 9}")
    assert decay.optimizer.schedule == ExponentialSchedule(decay_rate=0.5, decay_steps=9)


def test_sparse_optimizers_have_their_own_keys() -> None:
    assert load("optimizer.sparse.beta_1=0.5").optimizer.sparse == SparseAdamConfig(beta_1=0.5)
    ftrl = load("optimizer.sparse={kind: ftrl, l1: 0.5}").optimizer.sparse
    assert ftrl == SparseFTRLConfig(l1=0.5)
    with pytest.raises(ConfigError, match="unknown key"):
        load("optimizer.sparse={kind: sgd, l1: 0.5}")


def test_keys_of_the_dense_optimizer_are_arguments_for_keras() -> None:
    config = load("optimizer.dense={kind: AdamW, weight_decay: 0.1, learning_rate: 0.5}")
    assert config.optimizer.dense.arguments == {"weight_decay": 0.1}
    assert config == TrainConfig.model_validate(config.resolved())


def test_a_path_alone_is_a_warm_start() -> None:
    warm = load("fit.warm_start=work/runs/old").fit.warm_start
    assert warm is not None
    assert (warm.path, warm.moments, warm.mismatched) == ("work/runs/old", "reset", "refuse")
    given = load("fit.warm_start.path=x", "fit.warm_start.moments=transfer").fit.warm_start
    assert given is not None
    assert (given.path, given.moments) == ("x", "transfer")
    assert load("fit.warm_start=null").fit.warm_start is None


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.schedule=cosin",
        "optimizer.sparse.kind=rmsprop",
        "optimizer.accumulate_steps=1",
        "optimizer.warmup_steps=0",
        "optimizer={clip_norm: 1.0, clip_value: 1.0}",
        "compute.half_dtype=float8",
    ],
)
def test_update_rules_that_no_run_could_use_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(override)


@pytest.mark.parametrize(
    "override",
    [
        "fit.checkpoint.every_steps=0",
        "fit.checkpoint.every_minutes=0",
        "fit.checkpoint.keep_last=0",
        "fit.checkpoint.keep_best=0",
        "fit.warm_start=3",
        "fit.warm_start.moments=some",
    ],
)
def test_checkpoints_that_cannot_be_kept_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(override)
