"""The contract: rules on features and leaks, a whole build that it stops, the guide's example."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from conf.artefacts.dataset import DatasetPaths, read_manifest
from conf.errors import ExitCode, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from conf.load import load_config
from conf.schema import FeatureSchema, FeatureSpec
from etl.build import build_dataset
from etl.quality.contract import check_feature_rules, find_leaks
from etl.quality.label_statistics import LabelFocus
from etl.quality.statistics import StatisticsAccumulator, merge_statistics
from etl.quality.version_view import (
    STATISTICS_FILE,
    read_statistics,
    view_current,
    view_version,
)
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
    with caplog.at_level(logging.WARNING, "sluice.contract"):
        version = build_dataset(spark, elsewhere).version
    manifest = read_manifest(version)
    passed = [entry["passed"] for entry in manifest.contract]
    assert passed == [False, True, True, False, False]
    assert len([r for r in caplog.records if r.name == "sluice.contract"]) == 3
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
