"""Presets load; overrides reach any key; what does not fit is explained with the nearest name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from conf import errors, load
from conf.errors import ConfigError, render_event
from conf.etl.build import BuildConfig
from conf.load import load_config, override_config, preset_names, read_yaml
from conf.training.train import TrainConfig


@pytest.mark.parametrize(("model", "folder"), [(BuildConfig, "etl"), (TrainConfig, "training")])
def test_every_preset_is_valid(model, folder):
    assert all(load_config(model, folder, name).name for name in preset_names(folder))


def test_overrides_reach_nested_keys_and_lists():
    given = ["output.shards=3", "sources.ratings.columns.0.minimum=5", "spark.a.b=c"]
    config = load_config(BuildConfig, "etl", "ml_1m", given)
    assert config.output.shards == 3
    assert config.sources["ratings"].columns[0].minimum == 5
    assert config.spark == {"spark.a.b": "c"}


def test_a_key_that_stands_twice_is_refused_but_where_it_overrides(tmp_path):
    with pytest.raises(ConfigError, match="the value of fit has a key twice"):
        load_config(TrainConfig, "training", "demo", ["fit={epochs: 1, epochs: 2}"])
    # What a merge brings may be overridden, also where it is merged on.
    text = "fit: &a {epochs: 1}\nx: &b {<<: *a, epochs: 5}\ny: {<<: *b, epochs: 6}"
    (tmp_path / "mine.yaml").write_text(text)
    assert read_yaml("training", str(tmp_path / "mine.yaml"))["y"] == {"epochs": 6}


def test_a_file_starts_from_those_that_it_includes(tmp_path):
    (tmp_path / "shared").mkdir()
    for name, text in {
        "shared/small": "include: ../base.yaml\nfit: {epochs: 1}\nevaluation: {ks: [5]}\n",
        "base": "dataset: d\nfit: {epochs: 9, steps_per_loop: 7}\nevaluation: {ks: [1, 2]}\n",
        "fast": "input: {batch_size: 99}\nseed: 3\n",
        "mine": "include: [shared/small.yaml, fast.yaml]\nname: mine\nseed: 4\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    config = load_config(TrainConfig, "training", str(tmp_path / "mine.yaml"), ["fit.epochs=2"])
    assert (config.name, config.seed, config.input.batch_size) == ("mine", 4, 99)
    assert (config.fit.epochs, config.fit.steps_per_loop) == (2, 7)
    assert config.evaluation.ks == (5,)  # a list is replaced


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: other.yaml", "include each other in a circle"),
        ("include: gone.yaml", r"no such config(.|\n)*gone.yaml, which .*mine.yaml includes"),
        ("include: {a: 1}", "must be a file or a list of files"),
        ("include: [1]", "must be a file or a list of files"),
        ("- a list", "mapping"),
    ],
)
def test_includes_that_lead_nowhere_are_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("include: mine.yaml")
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, "training", str(tmp_path / "mine.yaml"))


def test_files_that_multiply_by_their_includes_are_refused_soon(tmp_path, monkeypatch):
    for number in range(8):
        again = [f"{number + 1}.yaml"] * 20 if number < 7 else []
        (tmp_path / f"{number}.yaml").write_text(f"include: {json.dumps(again)}\n")
    read, parse = [], load.parse_yaml
    monkeypatch.setattr(load, "parse_yaml", lambda *given: read.append(given) or parse(*given))
    with pytest.raises(ConfigError, match=r"too often(.|\n)*at most 100 files"):
        read_yaml("training", str(tmp_path / "0.yaml"))
    assert len(read) == 100


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("ouput.shards=3", "did you mean 'output'?"),
        ("sources.ratings.seperator=;", "did you mean 'separator'?"),
        (f"features.{'9' * 5000}.name=x", "a list element is named by its position"),
        ("features.\u00b2.name=x", "a list element is named by its position"),
        ("sources.ratings.columns.99.name=x", "a list element is named by its position"),
        ("output.shards=0", "output.shards"),
        ("noequals", "noequals"),
        ("name.x=3", "name"),
        ("name=../up", "name"),
        ("split.strategy=random", "split"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest(override, hint):
    with pytest.raises(ConfigError) as refused:
        load_config(BuildConfig, "etl", "ml_1m", [override])
    assert hint in str(refused.value)


def test_the_nearest_key_is_one_of_the_same_model():
    overrides = ["model={name: bst}", "model.every_position=true", "model.head=3"]
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, "training", "ml_1m_sasrec", overrides)
    message = str(refused.value)
    assert " model.head: unknown key; did you mean 'heads'?" in message
    assert "did you mean 'every_position'" not in message  # Which sasrec has, and bst has not.


@pytest.mark.parametrize(
    ("text", "said"),
    [("name: off", "off, no and false without quotes as False; write 'off'"),
     ("name: yes", "on, yes and true without quotes as True; write 'on'"),
     ("name: 7", "text is wanted; write '7'"),
     ("{off: 1}", "quote it"), ("sources: {off: {path: a.csv}}", "quote it"),
     ("sources: {log: {path: a.csv, columns: [{name: on, type: long}]}}", "quote it")],
)  # fmt: skip
def test_words_that_yaml_takes_for_booleans_are_to_be_quoted(tmp_path, text, said) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(BuildConfig, "etl", str(tmp_path / "c.yaml"))
    assert said in str(refused.value.fix)


def test_changed_keys_leave_the_defaults_of_the_others_open() -> None:
    config = TrainConfig.model_validate({"dataset": "d", "name": "n", "fit": {"epochs": 3}})
    changed = override_config(config, {"model.name": "mf", "optimizer.learning_rate": 1e-5}, "test")
    assert changed.model.name == "mf"
    assert changed.optimizer.learning_rate == 1e-5
    assert changed.fit.epochs == 3
    assert config.model.name == "dssm"
    with pytest.raises(ConfigError, match="epochs"):
        override_config(config, {"fit.epoch": 3}, "test")


LEAVES = [
    errors.ConfigError,
    errors.InputDataError,
    errors.UpstreamNotReadyError,
    errors.TrainingDivergedError,
    errors.InternalError,
]


def test_errors_have_codes_of_their_own_and_survive_a_process_border():
    assert len({0, *(cls.exit_code for cls in LEAVES)}) == len(LEAVES) + 1
    for cls in LEAVES:
        error = cls("bad", received=1, allowed=2, fix="x")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (cls, str(error))


def test_a_line_is_one_object_whatever_its_fields_hold() -> None:
    text = 'two\nlines, "quoted"'
    line = render_event("log", {"message": text, "file": Path("a/b")}, 1.23456)
    assert "\n" not in line
    assert json.loads(line) == {"event": "log", "time": 1.235, "message": text, "file": "a/b"}
