"""Runs by day keep the fitted numbers of the version before; held-out rows keep raw values."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from etl.build import BuildResult, build_dataset, check_config
from etl.earlier_encoders import describe_meaning, find_earlier_encoders
from etl.records.fitted_encoders import KEPT_FILE
from etl.versions.run_fingerprint import RunRequest, read_parent
from tests.etl.daily_versions import NUMBERS, build_days, log_config, run
from tests.etl.logs import change_keys, feature


@pytest.fixture(scope="module")
def versions(spark, tmp_path_factory) -> tuple[BuildConfig, list[BuildResult]]:
    """The version of day 0, that of day 1 after it, and that of day 1 fitted anew."""
    config = log_config(tmp_path_factory.mktemp("daily") / "log")
    return config, build_days(spark, config)


def operations(version: BuildResult) -> dict[str, Any]:
    return {c.feature: c.operation for c in read_plan_file(version.version / ENCODERS_DIR).columns}


def statistics(version: BuildResult, name: str) -> dict[int, dict[str, float]]:
    """Statistics by token; 0 and 1 are those of padding and of unknown tokens."""
    encoders = version.version / ENCODERS_DIR
    tokens = [0, 1, *pq.read_table(encoders / "item.parquet")["token"].to_pylist()]
    rows = pq.read_table(encoders / f"{name}.table.parquet").to_pylist()
    return dict(zip(tokens, rows, strict=True))


def test_a_later_day_keeps_numbers_and_fits_those_of_new_tokens(versions):
    _, (first, second, _) = versions
    before, after = operations(first), operations(second)
    assert before["price"].center > 0
    for name in ("price", "level", "crossed", "weight"):
        assert after[name] == before[name], name
    for name in ("item_rate", "item_count"):
        earlier, later = statistics(first, name), statistics(second, name)
        assert later.items() >= earlier.items()
        assert later.keys() - earlier.keys() == {91}
    assert statistics(second, "item_count")[91]["all"] == 3.0
    kept = json.loads((second.version / ENCODERS_DIR / KEPT_FILE).read_text())
    assert kept == dict.fromkeys(NUMBERS, first.manifest.dataset_version)
    assert f"encoders/{KEPT_FILE}" in {file.path for file in second.manifest.encoder_files}


def test_refit_fits_anew_and_is_another_run(versions):
    _, (first, second, third) = versions
    assert third.is_new
    assert third.manifest.run.fingerprint != second.manifest.run.fingerprint
    before, after = operations(first), operations(third)
    for name in ("price", "level", "crossed", "weight"):
        assert after[name] != before[name], name
    assert statistics(third, "item_count")[10] != statistics(first, "item_count")[10]
    assert not (third.version / ENCODERS_DIR / KEPT_FILE).exists()


def test_the_same_run_again_builds_nothing(spark, versions):
    config, (*_, third) = versions
    again = build_dataset(spark, config, request=run(1, refit=True))
    assert (again.version, again.is_new) == (third.version, False)


def find(config: BuildConfig, changes: dict[str, Any] | None = None) -> frozenset[str] | None:
    """The features whose numbers a run with some changes of the config would keep."""
    paths = DatasetPaths(Path(config.output.root), config.name)
    config = change_keys(config, changes or {})
    plan = check_config(config, RunRequest())
    found = find_earlier_encoders(paths, config, plan, read_parent(paths), keeps_numbers=True)
    return None if found is None else found.kept


def test_what_is_declared_in_another_way_is_fitted_anew(versions):
    config, _ = versions
    assert find(config) == set(NUMBERS)
    robust = find(config, {"features.3.encoding.method": "robust"})
    assert robust == set(NUMBERS) - {"price"}
    assert find(config, {"label.at_least": 0.5}) == set(NUMBERS) - {"item_rate"}
    weighed = find(config, {"sources.items.null_values": ["0"]})
    assert "price" in weighed
    assert "weight" not in weighed
    by_hand = feature("price", "price", kind="normalize", constants=[3, 4.2])
    ids = [feature("user", "user", "user"), feature("item", "item", "item")]
    assert find(config, {"features": [*ids, by_hand]}) is None


WRITTEN = {
    "sources": {
        "log": {"columns": [{"name": "ts"}, {"name": "price"}], "separator": ","},
        "items": {"columns": [{"name": "item"}, {"name": "weight", "field": "w"}]},
    },
    "joins": [{"source": "items", "column": "item", "unmatched": "keep"}],
    "rolling": [{"name": "spent", "keys": ["item"], "where": {"column": "price"}}],
}


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        (lambda c: c["sources"]["log"]["columns"][1].update(minimum=0), ()),
        (lambda c: c["sources"]["log"].update(path="other.csv"), ()),
        (lambda c: c["sources"]["log"].update(separator=";"), ("price", "spent")),
        (lambda c: c["sources"]["log"]["columns"].reverse(), ("price", "spent")),
        (lambda c: c["sources"]["items"]["columns"].reverse(), ("weight", "spent")),
        (lambda c: c["sources"]["items"]["columns"][1].update(field="kg"), ("weight",)),
        (lambda c: c["joins"][0].update(valid_from="ts"), ("weight", "spent")),
        (lambda c: c["joins"][0].update(unmatched="drop"), ()),
        (lambda c: c["rolling"][0].update(window_days=7), ("spent",)),
    ],
)
def test_what_a_column_means_is_what_makes_its_values(change, meant):
    changed = copy.deepcopy(WRITTEN)
    change(changed)
    for name in ("price", "weight", "spent"):
        is_same = describe_meaning(WRITTEN, [name]) == describe_meaning(changed, [name])
        assert is_same == (name not in meant), name


def raise_center(plan: bytes) -> bytes:
    """The same number of bytes."""
    return re.sub(rb'(?<="center": )\d', lambda digit: b"%d" % (int(digit[0]) % 9 + 1), plan)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("item_rate.table.parquet", lambda table: table[:-1], "is damaged"),
        ("encoders.json", raise_center, "were changed"),
    ],
)
def test_what_was_changed_since_is_not_taken_over(versions, name, change, message):
    config, (*_, third) = versions
    file = third.version / ENCODERS_DIR / name
    content = file.read_bytes()
    file.write_bytes(change(content))
    try:
        with pytest.raises(InputDataError, match=message) as refused:
            find(config)
    finally:
        file.write_bytes(content)
    assert refused.value.exit_code == 3
    assert find(config)
