"""Rules on features and leaks, over the statistics of a version written without Spark."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from conf.dataset import DatasetPaths, read_manifest
from conf.etl.contract import ContractConfig
from conf.schema import FeatureSchema, FeatureSpec
from etl.quality.feature_rules import check_feature_rules
from etl.quality.leakage import find_leaks
from etl.quality.versions import STATISTICS_FILE, read_statistics, view_current, view_version
from etl.statistics import LabelFocus, StatisticsAccumulator, merge_statistics
from tests.etl.logs import build_config
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
    ({"kind": "type", "feature": "rating", "type": "float32"}, True, "0 of 720"),
    ({"kind": "type", "feature": "rating", "type": "int64"}, False, "float32"),
    ({"kind": "range", "feature": "rating", "minimum": 1, "maximum": 5}, True, "1 to 5"),
    ({"kind": "range", "feature": "rating", "minimum": 2}, False, "1 to 5"),
    ({"kind": "domain", "feature": "rating", "one_of": [1, 2, 3, 4, 5]}, True, "0 of 720"),
    ({"kind": "domain", "feature": "rating", "one_of": [1, 2, 3, 4]}, False, "such as '5'"),
    ({"kind": "null_rate", "feature": "rating", "maximum": 0}, True, "0 of 720"),
    ({"kind": "null_rate", "feature": "rating", "split": "catalog", "maximum": 0.5}, False, "8 of"),
    ({"kind": "drift", "feature": "movie_id", "maximum": 0.2}, False, ""),
    ({"kind": "drift", "feature": "rating", "metric": "ks", "maximum": 0.2}, True, "0.0"),
    ({"kind": "drift", "feature": "movie_id", "metric": "ks"}, False, "without an order"),
    ({"kind": "volume", "split": "catalog", "max_change_percent": 50}, False, "-80.0 %"),
    ({"kind": "volume", "split": "train", "min_rows": 720, "max_rows": 720}, True, "720 rows"),
]  # fmt: skip


def test_each_kind_of_rule(views):
    results = check(views, *(rule for rule, _, _ in RULES))
    for result, (rule, passes, received) in zip(results, RULES, strict=True):
        assert result.passed is passes, (rule, result)
        assert received in result.received, (rule, result)


def test_without_an_earlier_version_drift_and_change_have_nothing_to_compare(views):
    rules = [RULES[8][0], {"kind": "volume", "split": "train", "max_change_percent": 0}]
    results = check(views, *rules, previous=False)
    assert [result.passed for result in results] == [True, True]
    assert all("no version to compare with" in result.received for result in results)


def test_values_of_a_vocabulary_are_told_by_their_tokens_and_oov_is_null(views):
    (null,) = check(views, {"kind": "null_rate", "feature": "user_id", "maximum": 0})
    oov = views[1].statistics["train"]["user_id"]["oov"]
    assert oov > 0
    assert null.received.startswith(f"{oov} of 720")
    shown = views[1].distribution("train", "movie_id").counts
    assert shown.keys() <= {str(k) for k in range(1, 9)} | {"(pad)", "(oov)"} or all(
        not name.isdigit() for name in shown
    )


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


def leaks(table, **settings):
    whole = pa.table(table).combine_chunks().to_batches()[0]
    accumulator = StatisticsAccumulator(whole.schema, LabelFocus("label"))
    accumulator.update(whole)
    specs = tuple(FeatureSpec(name, "float32", "context") for name in whole.schema.names)
    specs = tuple(replace(s, role="label") if s.name == "label" else s for s in specs)
    specs = tuple(replace(s, role="id") if s.name == "carried" else s for s in specs)
    config = ContractConfig.model_validate({"leakage": settings}).leakage
    found = find_leaks(config, FeatureSchema(specs), merge_statistics([accumulator.to_dict()]))
    return {result.rule.removeprefix("leakage feature ") for result in found}


def test_a_copy_of_the_label_leaks_and_what_only_goes_along_does_not():
    label = [float(k * k % 7 < 3) for k in range(400)]
    noisy = [v if k % 9 else 1 - v for k, v in enumerate(label)]
    table = {
        "copy": [3 - 2 * v for v in label],
        "category": [f"{'yes' if v else 'no'}{k % 3}" for k, v in enumerate(label)],
        "noisy": noisy,
        "row": [float(k) for k in range(400)],
        "carried": label,
        "label": label,
    }
    assert leaks(table) == {"copy", "category"}
    assert leaks(table, min_rows=401) == set()
    assert "noisy" in leaks(table, maximum=0.5)
