"""The contract: rules on sources, features and leaks, a build that it stops, and the guide's."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from conf.artefacts.dataset import DatasetPaths, read_manifest
from conf.errors import ConfigError, ExitCode, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from conf.load import load_config
from conf.schema import FeatureSchema, FeatureSpec
from etl.build import build_dataset
from etl.quality.contract import ask_rules, check_feature_rules, check_source_rules, find_leaks
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import StatisticsAccumulator, merge_statistics
from etl.quality.version_view import (
    STATISTICS_FILE,
    read_statistics,
    view_current,
    view_version,
)
from etl.sources.bad_rows import count_rows
from etl.sources.read import read_source
from tests.etl.logs import RATINGS, build_config, write_logs
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset

LATER = "20261102T101500000000Z-0badcafe"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("versions")


@pytest.fixture(scope="module")
def views(root):
    """Two versions: the later one has fewer items."""
    found = []
    for config in (FakeConfig(users=60, items=40), FakeConfig(users=60, items=8, version_id=LATER)):
        version = write_dataset(root, config)
        found.append(view_version(version, read_manifest(version)))
    return found


def check(views, *rules, previous=True):
    contract = ContractConfig.model_validate({"rules": rules, "leakage": None})
    config = build_config(views[1].directory, views[1].directory)
    config = config.model_copy(update={"contract": contract})
    return check_feature_rules(config, views[1], views[0] if previous else None)


RULES = [
    # rule, passes, what is received
    ({"kind": "type", "feature": "rating", "type": "float32"}, True, "float32"),
    ({"kind": "type", "feature": "rating", "type": "int64"}, False, "float32"),
    ({"kind": "range", "feature": "rating", "minimum": 1, "maximum": 5}, True, "1 to 5"),
    ({"kind": "range", "feature": "rating", "minimum": 2}, False, "1 to 5"),
    ({"kind": "domain", "feature": "rating", "one_of": [1, 2, 3, 4, 5]}, True, "0 of 720"),
    ({"kind": "domain", "feature": "rating", "one_of": [1, 2, 3, 4]}, False, "such as '5'"),
    ({"kind": "null_rate", "feature": "rating", "max_rate": 0}, True, "0 of 720"),
    ({"kind": "null_rate", "feature": "rating", "split": "catalog", "max_rate": 0.5}, False, "8"),
    ({"kind": "drift", "feature": "movie_id", "maximum": 0.2}, False, ""),
    ({"kind": "drift", "feature": "rating", "metric": "ks", "maximum": 0.2}, True, "0.0"),
    ({"kind": "drift", "feature": "movie_id", "metric": "ks"}, False, "without an order"),
    ({"kind": "volume", "split": "catalog", "max_change_percent": 50}, False, "-80.0 %"),
    ({"kind": "volume", "split": "train", "minimum": 720, "maximum": 720}, True, "720 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "passes", "received"), RULES)
def test_each_kind_of_rule(views, rule, passes, received):
    (result,) = check(views, rule)
    assert result.passed is passes
    assert received in result.received
    if rule["kind"] == "drift" or "max_change_percent" in rule:
        (result,) = check(views, rule, previous=False)
        assert result.passed
        assert "no version to compare with" in result.received


def test_unknown_tokens_of_a_vocabulary_are_nulls(views):
    (null,) = check(views, {"kind": "null_rate", "feature": "user_id", "max_rate": 0})
    oov = views[1].statistics["train"]["user_id"]["oov"]
    assert oov > 0
    assert null.received.startswith(f"{oov} of 720")


def test_the_current_version_is_found_and_a_damaged_one_is_none(root, views, tmp_path):
    paths = DatasetPaths(root, "demo")
    found = view_current(paths)
    assert found.directory.name == LATER
    assert found.statistics.keys() == {"train", "validation", "test", "catalog", "users"}
    assert view_current(DatasetPaths(tmp_path, "demo")) is None
    version = write_dataset(tmp_path, FakeConfig(users=20, items=8))
    (version / STATISTICS_FILE).write_text("{")
    assert view_current(DatasetPaths(tmp_path, "demo")) is None
    (version / STATISTICS_FILE).unlink()
    assert read_statistics(version) == {}


def leaks(table):
    whole = pa.table(table).combine_chunks().to_batches()[0]
    accumulator = StatisticsAccumulator(whole.schema, LabelFocus("label"))
    accumulator.update(whole)
    specs = tuple(FeatureSpec(name, "float32", "context") for name in whole.schema.names)
    specs = tuple(replace(s, role="label") if s.name == "label" else s for s in specs)
    specs = tuple(replace(s, role="id") if s.name == "carried" else s for s in specs)
    found = find_leaks("warn", FeatureSchema(specs), merge_statistics([accumulator.to_dict()]))
    return {result.rule.removeprefix("leakage feature ") for result in found}


def test_a_copy_of_the_label_leaks_and_what_only_goes_along_does_not():
    label = [float(k * k % 7 < 3) for k in range(400)]
    table = {
        "copy": [3 - 2 * v for v in label],
        "category": [f"{'yes' if v else 'no'}{k % 3}" for k, v in enumerate(label)],
        "row": [float(k) for k in range(400)],
        "carried": label,
        "label": label,
    }
    assert leaks(table) == {"copy", "category"}


def test_violated_rules_stop_the_publish_and_others_are_in_manifest_and_log(
    spark, built, tmp_path, caplog
):
    result, config = built
    paths = DatasetPaths(result.version.parents[2], config.name)
    before = paths.current.read_text(), sorted(paths.versions.iterdir())
    logs = write_logs(tmp_path / "logs", [*RATINGS, *(f"1::10::9::{k}" for k in range(500, 520))])
    rules = [
        {"kind": "range", "source": "ratings", "column": "rating", "maximum": 5},
        {"kind": "volume", "source": "ratings", "max_change_percent": 50},
        {"kind": "domain", "source": "users", "column": "gender", "one_of": ["F", "M"]},
        {"kind": "unique", "source": "ratings", "column": ["user", "item"], "severity": "warn"},
    ]
    changed = build_config(logs, result.version.parents[2], contract={"rules": rules})
    with pytest.raises(InputDataError) as error:
        build_dataset(spark, changed)
    message = error.value.render()
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    named = [kind in message for kind in ("range ratings.rating", "volume ratings")]
    assert named == [True, True]
    assert "unique" not in message
    assert "domain" not in message
    assert (paths.current.read_text(), sorted(paths.versions.iterdir())) == before

    warned = [{**rule, "severity": "warn"} for rule in rules]
    warned.append({"kind": "volume", "split": "train", "minimum": 999, "severity": "warn"})
    contract = {"rules": warned, "slices": ["gender"]}
    elsewhere = build_config(logs, tmp_path / "datasets", contract=contract)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sluice.contract"):
        version = build_dataset(spark, elsewhere).version
    manifest = read_manifest(version)
    passed = [entry["passed"] for entry in manifest.contract]
    assert passed == [False, True, True, False, False]
    said = [str(r.args[0]).split()[0] for r in caplog.records if r.name == "sluice.contract"]
    assert said == ["range", "unique", "volume"]
    stored = read_statistics(version)["train"]["rating"]
    summary = manifest.statistics["train"]["rating"]
    assert stored["quantiles"] == json.loads(json.dumps(summary["quantiles"]))
    assert (manifest.statistics_file.path, "sketch" in stored) == ("statistics.json", True)
    slices = manifest.statistics["train"]["gender"]["label"]["slices"]
    assert sum(n for _, n, _ in slices) == manifest.counts.kept["train"]


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "validation.md"


def test_the_guides_contract_fits_the_demo():
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    demo = load_config(BuildConfig, "etl", "demo", []).model_dump(mode="json")
    config = BuildConfig.model_validate({**demo, **yaml.safe_load(block)})
    assert len(config.contract.rules) == 13
    assert config.contract.sources == {"ratings", "users", "movies"}


LOG = ["1\ta\t0.5\t10|20\t1000", "2\tb\t4.1\t10\t2000", "2\tc\t\t\t3600", "x\ta\t1\t\t1",
       "4\t\t9.5\t30|10\t7200"]  # fmt: skip
KEYS = ["1", "2", "3", "1"]


@pytest.fixture(scope="module")
def read(spark, tmp_path_factory):
    """The sources, their config, and their rows."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / "log.tsv").write_text("\n".join(LOG) + "\n")
    (folder / "keys.tsv").write_text("\n".join(KEYS) + "\n")
    base = build_config(folder, folder / "out").model_dump()
    columns = [
        {"name": "id", "type": "int64"},
        {"name": "word", "type": "string"},
        {"name": "price", "type": "float32", "nullable": True},
        {"name": "tags", "type": "list<int64>", "separator": "|", "nullable": True},
        {"name": "ts", "type": "int64"},
    ]
    config = BuildConfig.model_validate({
        **base,
        "sources": {
            "log": {"path": "log.tsv", "columns": columns},
            "keys": {"path": "keys.tsv", "columns": columns[:1], "key": "id"},
        },
        "events": {"source": "log", "user": "id", "item": "word", "time": "ts"},
        "joins": [],
        "label": None,
        "features": [
            {"name": "id", "column": "id", "role": "user"},
            {"name": "word", "column": "word", "role": "item"},
        ],
    })  # fmt: skip
    # The item's column may not be null in a config; the rows here are read as if it might.
    config.sources["log"].columns[1].__dict__["nullable"] = True
    return config, {
        name: read_source(spark, name, source, str(folder))
        for name, source in config.sources.items()
    }


def check_sources(read, *rules, run_date=date(1970, 1, 1)):
    config, sources = read
    contract = ContractConfig.model_validate({"rules": rules})
    config = config.model_copy(update={"contract": contract})
    sources = ask_rules(config, sources)
    counts = {name: count_rows(source) for name, source in sources.items()}
    return check_source_rules(config, sources, counts, {"log": 8}, run_date)


LOG_RULES = [
    # rule, passes, what is received
    ({"kind": "type", "column": "id", "type": "int64"}, False, "1 of 5"),
    ({"kind": "type", "column": "id", "type": "int64", "max_rate": 0.2}, True, "1 of 5"),
    ({"kind": "range", "column": "price", "maximum": 4.1}, False, "1 of 3"),
    ({"kind": "range", "column": "price", "minimum": 0.5, "maximum": 9.5}, True, "0 of 3"),
    ({"kind": "range", "column": "price", "minimum": 1, "max_rate": 0.4}, True, "0.5 to 9.5"),
    ({"kind": "range", "column": "tags", "maximum": 20}, False, "1 of 3"),
    ({"kind": "domain", "column": "word", "one_of": ["a", "b"]}, False, "such as 'c'"),
    ({"kind": "domain", "column": "tags", "one_of": [10, 20, 30]}, True, "0 of 3"),
    ({"kind": "null_rate", "column": "word", "max_rate": 0.25}, True, "1 of 4"),
    ({"kind": "null_rate", "column": "tags", "max_rate": 0.2}, False, "1 of 4"),
    ({"kind": "unique", "column": "id"}, False, "1 of 4"),
    ({"kind": "unique", "column": ["id", "word"]}, True, "0 of 3"),
    ({"kind": "references", "column": "id", "dictionary": "keys"}, False, "such as '4'"),
    ({"kind": "references", "column": "id", "dictionary": "keys", "max_rate": 0.25}, True, "1 of"),
    ({"kind": "volume", "minimum": 5}, False, "4 rows"),
    ({"kind": "volume", "max_change_percent": 50}, True, "-50.0 %"),
    ({"kind": "volume", "max_change_percent": 49}, False, "8 before"),
    ({"kind": "freshness", "column": "ts", "maximum": 22}, True, "22.0 h old"),
    ({"kind": "freshness", "column": "ts", "maximum": 21.9}, False, "1970-01-01, 22.0 h"),
    ({"kind": "freshness", "column": "ts", "maximum": 99, "date": "1969-12-31"}, False,
     "2.0 h ahead"),
]  # fmt: skip


def test_each_kind_of_rule_in_one_pass(read):
    results = check_sources(read, *({"source": "log", **rule} for rule, _, _ in LOG_RULES))
    for result, (rule, passes, received) in zip(results, LOG_RULES, strict=True):
        assert result.passed is passes, (rule, result)
        assert received in result.received, (rule, result)
        assert result.rule.startswith(rule["kind"])


def test_freshness_needs_a_day_unless_the_wall_clock_is_asked_for(read):
    rule = {"kind": "freshness", "source": "log", "column": "ts", "maximum": 1}
    with pytest.raises(ConfigError, match="--date"):
        check_sources(read, rule, run_date=None)
    (result,) = check_sources(read, {**rule, "date": "now"}, run_date=None)
    assert not result.passed  # more than an hour since 1970
