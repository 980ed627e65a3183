"""What training does about damage, as the config has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.artefacts.run import RUN_CARD_FILE, read_json, update_run_card, write_json
from conf.errors import ConfigError
from conf.load import load_config
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig
from conf.training.objectives import SampledSoftmaxConfig
from conf.training.optimizer import CosineSchedule, SparseAdamConfig, SparseFTRLConfig
from conf.training.tables import DynamicTableConfig, StaticTableConfig, UniformConfig
from conf.training.train import StepRange, TrainConfig, parse_step_range
from conf.training.trials import ChoicesConfig, RangeConfig, SweepConfig

REQUIRED = ["dataset=d", "name=n"]


def load(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, "training", None, [*REQUIRED, *overrides])


def test_keys_without_a_tag_are_those_of_the_default() -> None:
    model = load(
        "model.embedding_dim=4", "model.objective.negatives={source: mixed, count: 64}"
    ).model
    assert isinstance(model, DSSMConfig)
    assert model.embedding_dim == 4
    assert model.objective == SampledSoftmaxConfig(negatives={"source": "mixed", "count": 64})


def test_keys_that_are_gone_are_read_where_they_were_off_and_refused_elsewhere() -> None:
    """Runs keep their config, and have every key in it."""
    settings = load("input.batch_size=9").resolved()
    settings["input"]["decoder"] = "block"
    settings["fit"] |= {"histograms": None, "gradient_norms": False, "graph": False}
    assert TrainConfig.model_validate(settings) == load("input.batch_size=9")
    for override in ("input.decoder=tensorflow", "fit.graph=true"):
        with pytest.raises(ConfigError, match="unknown key"):
            load(override)


def test_a_schedule_is_given_by_its_name_or_with_its_arguments() -> None:
    assert load("optimizer.schedule=cosine").optimizer.schedule == CosineSchedule()
    short = load("optimizer.schedule={kind: cosine, final_share: 0.5, steps: 9}")
    assert short.optimizer.schedule == CosineSchedule(final_share=0.5, steps=9)


def test_optimizers_have_keys_of_their_own_and_the_dense_one_arguments_for_keras() -> None:
    adam = load("optimizer.sparse.learning_rate=0.5").optimizer.sparse
    assert adam == SparseAdamConfig(learning_rate=0.5)
    ftrl = load("optimizer.sparse={kind: ftrl, l1: 0.5}").optimizer.sparse
    assert ftrl == SparseFTRLConfig(l1=0.5)
    config = load("optimizer.dense={kind: AdamW, weight_decay: 0.1, learning_rate: 0.5}")
    assert config.optimizer.dense.arguments == {"weight_decay": 0.1}
    assert config == TrainConfig.model_validate(config.resolved())


def test_a_path_alone_is_a_warm_start() -> None:
    warm = load("fit.warm_start=work/runs/old").fit.warm_start
    assert warm is not None
    assert (warm.path, warm.moments, warm.mismatched) == ("work/runs/old", "reset", "refuse")
    assert load("fit.warm_start=null").fit.warm_start is None
    files = load("fit.warm_start.tables.items=rows.txt").fit.warm_start
    assert files is not None
    assert (files.path, files.tables) == (None, {"items": "rows.txt"})


def test_a_kind_may_stand_alone_and_follows_else_from_the_keys() -> None:
    assert load("model.name=mf").model.embeddings == {}
    config = load(
        "model.embeddings.g=static",
        "model.embeddings.h=dynamic",
        "model.embeddings.a.dim=auto",
        "model.embeddings.b={dim: 8, trainable: false, initializer: uniform}",
        "model.embeddings.c={l2: 0.5, dense: true}",
        "model.embeddings.d={l2: 0.5, max_rows: 7}",
        "model.embeddings.e={}",
        "model.embeddings.f={kind: dynamic, dim: 3}",
    )
    assert TrainConfig.model_validate(config.resolved()) == config
    assert config.model.embeddings == {
        "a": StaticTableConfig(dim="auto"),
        "b": StaticTableConfig(dim=8, trainable=False, initializer=UniformConfig()),
        "c": StaticTableConfig(l2=0.5, dense=True),
        "d": DynamicTableConfig(l2=0.5, max_rows=7),
        "e": DynamicTableConfig(),
        "f": DynamicTableConfig(dim=3),
        "g": StaticTableConfig(),
        "h": DynamicTableConfig(),
    }


SEVERAL, SHARDED = "devices.strategy=multi_worker", "model.embeddings.a={shard: workers}"
OBJECTIVE, TABLE = "model.objective.", "model.embeddings.a"
REFUSED = [
    ([OBJECTIVE + "negatives={source: uniform}"], "needs a `count`"),
    ([OBJECTIVE + "negatives={count: 5}"], "takes no `count`"),
    ([OBJECTIVE + "negatives={source: uniform, count: 5, distortion: 1}"], "no `distortion`"),
    ([OBJECTIVE + "negatives={source: uniform, count: 5, hardest: 5}"], "leaves nothing out"),
    ([OBJECTIVE + "kind=bpr", OBJECTIVE + "negatives={source: batch}"], "adaptive"),
    ([OBJECTIVE + "kind=softmax", OBJECTIVE + "mask=target"], "user_items"),
    ([OBJECTIVE + "logq_correction=-1"], "greater than or equal to 0"),
    (["seed=2147483648"], "seed"),
    (["optimizer.learning_rate=.inf"], "learning_rate"),
    (["optimizer.schedule=cosin"], "schedule"),
    (["optimizer.warmup_steps=0"], "warmup_steps"),
    (["optimizer.sparse={kind: sgd, l1: 0.5}"], "unknown key"),
    (["model.temperature=.inf"], "temperature"),
    (["model=dssm"], "model"),
    (["model.embedings.a=dynamic"], "embeddings"),
    (["fit.checkpoint.every_minutes=0"], "every_minutes"),
    (["fit.checkpoint.keep_last=0"], "keep_last"),
    (["fit.warm_start=3"], "warm_start"),
    (["fit.warm_start.moments=some"], "moments"),
    (["fit.warm_start.moments=reset"], "warm_start"),  # from nothing
    (['fit.warm_start={tables: {a: "b.txt"}, moments: transfer}'], "warm_start"),
    ([TABLE + ".dim=0"], "1 or more, or auto"),
    ([TABLE + "={kind: dynamic, dim: auto}"], "auto needs the size of a vocabulary"),
    ([TABLE + "={l2: 1, trainable: false}"], "`l2` changes rows"),
    ([TABLE + "={dense: true, trainable: false}"], "`dense` updates all rows"),
    ([TABLE + ".initializer={kind: uniform, low: 1, high: 1}"], "above `low`"),
    ([TABLE + ".max_row=7"], "max_rows"),
    ([TABLE + ".max_rows=0"], "max_rows"),
    ([TABLE + ".max_rows=18446744073709551616"], "less than or equal"),
    ([TABLE + ".capacity=9223372036854775807"], "less than or equal"),
    ([TABLE + "=dinamic"], "dynamic"),
    ([TABLE + "={kind: static, shard: workers}"], "`shard` is a key of dynamic tables"),
    ([TABLE + ".features=[]"], "features"),
    (["fit={epochs: null}"], "nothing ends training"),
    (["fit.early_stopping.by=steps"], "needs validations between steps"),
    ([SEVERAL, "devices.cpu_replicas=2"], "one CPU device per process"),
    (["devices={strategy: none, cpu_replicas: 2}"], "one CPU device per process"),
    ([SEVERAL, "input.bucket_boundaries=[10, 20]"], "leave bucket_boundaries out"),
    ([SHARDED], "devices.strategy=multi_worker"),
    ([SHARDED, SEVERAL, "root=s3://b/runs"], "is a store"),
    ([SHARDED, SEVERAL, "fit.warm_start={tables: {a: i.txt}}"], "no rows from files"),
]


@pytest.mark.parametrize(("overrides", "hint"), REFUSED)
def test_what_no_run_could_use_is_refused(overrides: list[str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load(*overrides)


@pytest.mark.parametrize(
    ("policy", "found_bytes", "split", "expected"),
    [
        ("fail", None, "train", False),
        ("skip_record", None, "train", False),  # no record of it is there
        ("skip_record", 9, "train", True),
        ("skip_record", 11, "train", False),  # another file
        ("skip_shard", None, "train", True),
        ("skip_shard", 11, "train", True),
        ("skip_shard", None, "test", False),  # what a model is measured on has to be whole
        ("skip_record", 9, "catalog", False),
    ],
)
def test_which_shards_training_does_without(policy, found_bytes, split, expected) -> None:
    config = InputConfig(on_corrupt=policy)
    assert config.tolerates(split, found_bytes, 10) is expected


@pytest.mark.parametrize("text", ["", "5", "a:b", "1:2:3", "-1:2", "1.5:2", " 1:2", "5:5", "7:3"])
def test_two_numbers_are_a_range(text: str) -> None:
    assert parse_step_range("100:120") == StepRange(100, 120)
    parse_step_range("0:1").require_within(1)
    with pytest.raises(ConfigError, match=r"two steps|empty"):
        parse_step_range(text)
    with pytest.raises(ConfigError, match="does not have"):
        StepRange(5, 25).require_within(24)


def read(tmp_path: Path, text: str) -> SweepConfig:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    return load_config(SweepConfig, "training", str(file))


def test_a_file_of_lists_and_ranges(tmp_path: Path) -> None:
    space = "{model.user_hidden_units: [[64], []], seed: {low: 1e-4, high: 1e-1, log: true}}"
    found = read(tmp_path, f"trials: 20\nspace: {space}")
    assert found.trial_count == 20
    assert isinstance(found.space["model.user_hidden_units"], ChoicesConfig)
    rate = found.space["seed"]
    assert isinstance(rate, RangeConfig)
    assert (rate.low, rate.high) == (1e-4, 1e-1)


def test_a_grid_has_as_many_trials_as_points(tmp_path: Path) -> None:
    grid = "sampler: grid\nspace: {seed: [1, 2, 3], fit.epochs: [1, 2]}\n"
    assert read(tmp_path, grid).trial_count == 6
    assert read(tmp_path, grid + "trials: 4\n").trial_count == 4
    assert read(tmp_path, grid + "trials: 40\n").trial_count == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trials: 2\nspace: {}", "space"),
        ("space: {seed: [1]}", "number of trials"),
        ("sampler: grid\nspace: {seed: {low: 1, high: 2}}", "grid needs lists"),
        ("trials: 2\nspace: {seed: {low: 2, high: 1}}", "less than high"),
        ("trials: 2\nspace: {seed: {low: 0, high: 1, log: true}}", "low > 0"),
        ("trials: 2\nspace: {seed: {low: 0.5, high: 2, integer: true}}", "whole numbers"),
        ("trial: 2\nspace: {seed: [1]}", "trials"),
    ],
)
def test_what_cannot_be_tried_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_the_first_task_stays_first_in_a_run_card(tmp_path: Path) -> None:
    """Lists are ranked by it, and metrics without a name in front are its own."""
    tasks = {"like": {"label": "a"}, "click": {"label": "b"}}
    config = {"name": "n", "dataset": "d", "model": {"kind": "ranking", "tasks": tasks}}
    card = {"config": TrainConfig.model_validate(config).resolved()}
    write_json(tmp_path / RUN_CARD_FILE, card)
    update_run_card(tmp_path, status="trained")
    again = TrainConfig.model_validate(read_json(tmp_path / RUN_CARD_FILE)["config"])
    assert list(again.model.tasks) == ["like", "click"]
