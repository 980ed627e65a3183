"""Runs by day keep the fitted numbers of the version before; held-out rows keep raw values."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from etl.build import BuildResult, build_dataset
from etl.earlier_encoders import describe_meaning, find_earlier_encoders
from etl.records.fitted_encoders import KEPT_FILE
from etl.stages.run_stages import check_config
from etl.tfrecord.types.features import WireFeature
from etl.versions.run_fingerprint import RunRequest, read_parent
from tests.etl.daily_versions import DAY_S, NUMBERS, build_days, log_config, run
from tests.tfrecord_files import read_file


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


def test_rows_that_are_not_trained_on_hold_raw_values(versions):
    _, (_, second, _) = versions
    wanted = [WireFeature(f"raw_{name}", kind, True) for name, kind in
              (("price", "bytes"), ("item", "int64"), ("user", "int64"))]  # fmt: skip
    wanted.append(WireFeature("price", "float32"))

    def read(split: str) -> pa.Table:
        shards = [second.version / shard.path for shard in second.manifest.split(split).shards]
        return pa.concat_tables(read_file(shard, wanted) for shard in shards)

    assert {spec.role for spec in second.manifest.schema.features if spec.name[:4] == "raw_"} == {
        "id"
    }
    train, test, catalog = read("train"), read("test"), read("catalog")
    assert not any(any(train[name].to_pylist()) for name in ("raw_price", "raw_item", "raw_user"))
    scale = operations(second)["price"]
    for raw, value in zip(test["raw_price"].to_pylist(), test["price"].to_pylist(), strict=True):
        expected = [(float(text) - scale.center) * scale.factor for text in raw] or [0.0]
        assert value == pytest.approx(expected[0], rel=1e-6)
    assert [] in test["raw_price"].to_pylist()
    assert all(len(item) == 1 for item in test["raw_item"].to_pylist())
    assert {tuple(item) for item in catalog["raw_item"].to_pylist()} >= {(10,), (91,)}


def find(config: BuildConfig, **changes: Any) -> frozenset[str] | None:
    paths = DatasetPaths(Path(config.output.root), config.name)
    config = BuildConfig.model_validate({**config.model_dump(), **changes})
    plan = check_config(config, RunRequest())
    found = find_earlier_encoders(paths, config, plan, read_parent(paths), keeps_numbers=True)
    return None if found is None else found.kept


def test_what_is_declared_in_another_way_is_fitted_anew(versions, caplog):
    config, _ = versions
    assert find(config) == set(NUMBERS)
    features = [feature.model_dump() for feature in config.features]
    user, item, _, price, *_ = features
    price["encoding"]["method"] = "robust"
    assert find(config, features=features) == set(NUMBERS) - {"price"}
    label = {**config.first_label.model_dump(), "at_least": 0.5}
    assert find(config, label=label) == set(NUMBERS) - {"item_rate"}
    sources = {name: source.model_dump() for name, source in config.sources.items()}
    weighed = {**sources["items"], "null_values": ("0",)}
    assert find(config, sources={**sources, "items": weighed}) < set(NUMBERS)
    assert "price" in find(config, sources={**sources, "items": weighed})
    assert "weight" not in find(config, sources={**sources, "items": weighed})
    price["encoding"] = {"kind": "normalize", "constants": [3, 4.2]}
    item["encoding"] = {"kind": "vocabulary"}
    assert find(config, features=[user, item, price]) is None


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
    found = {
        name
        for name in ("price", "weight", "spent")
        if describe_meaning(WRITTEN, [name]) != describe_meaning(changed, [name])
    }
    assert found == set(meant)


def test_numbers_are_those_of_the_days_of_the_run(versions):
    _, (*_, third) = versions
    rows = pd.read_csv(
        Path(versions[0].data_dir) / "log.csv", names=["user", "item", "price", "bought", "ts"]
    )
    day = rows[(rows.ts // DAY_S == 1) & (rows.ts < rows[rows.ts // DAY_S == 1].ts.quantile(0.7))]
    # The train split is the first part of the day; the earlier day is history alone.
    assert operations(third)["price"].center > 0.8 * day.price.mean()


def test_a_lost_file_of_the_version_before_is_named(versions):
    config, (*_, third) = versions
    file = third.version / ENCODERS_DIR / "item_rate.table.parquet"
    content = file.read_bytes()
    file.unlink()
    try:
        with pytest.raises(InputDataError, match="is damaged") as refused:
            find(config)
    finally:
        file.write_bytes(content)
    text = refused.value.render()
    assert "item_rate.table.parquet" in text
    assert "sluice versions rollback" in text
    assert refused.value.exit_code == 3


def test_numbers_that_were_changed_since_are_not_taken_over(versions):
    config, (_, _, third) = versions
    file = third.version / ENCODERS_DIR / "encoders.json"
    written, center = file.read_text(), str(operations(third)["price"].center)
    file.write_text(written.replace(center, center[:-1] + str((int(center[-1]) + 1) % 10)))
    assert len(file.read_text()) == len(written)
    paths = DatasetPaths(Path(config.output.root), config.name)
    parent = read_parent(paths)
    try:
        with pytest.raises(InputDataError, match="were changed"):
            find_earlier_encoders(
                paths, config, check_config(config, RunRequest()), parent, keeps_numbers=True
            )
    finally:
        file.write_text(written)
    assert find_earlier_encoders(
        paths, config, check_config(config, RunRequest()), parent, keeps_numbers=True
    )


def test_days_beside_others_are_not_fitted_anew(versions):
    config, _ = versions
    output = replace_output(config, partition_by=("date",), partition_overwrite="dynamic")
    split = config.split.model_copy(update={"test": 5})
    with pytest.raises(ConfigError, match="cannot be fitted anew for some days"):
        check_config(output.model_copy(update={"split": split}), replace(run(1), refit=True))


def replace_output(config: BuildConfig, **changes: Any) -> BuildConfig:
    return config.model_copy(update={"output": config.output.model_copy(update=changes)})
