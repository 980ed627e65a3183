"""Which raw columns are the items', and which lists stand side by side, by the build's config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.hashing import Cross
from conf.manifest import DatasetKeys
from conf.schema import FeatureSchema, FeatureSpec
from training.encoders.source import find_aligned, find_item_columns, find_pair_features

CONFIG: dict[str, Any] = {
    "joins": [
        {"source": "items", "column": "item"},
        {"source": "shops", "column": "shop"},
        {"source": "users", "column": "user"},
    ],
    "sources": {
        "items": {"key": "id", "columns": [{"name": n} for n in ("id", "shop", "price")]},
        "shops": {"key": "shop", "columns": [{"name": n} for n in ("shop", "city")]},
        "users": {"key": "user", "columns": [{"name": n} for n in ("user", "age")]},
    },
    "rolling": [
        {"name": "user_city_rate", "keys": ["user", "city"]},
        {"name": "user_views", "keys": ["user"]},
        {"name": "item_views", "keys": ["item"]},
    ],
}
ROLES = {
    "user": "user", "item": "item", "item_views": "item", "age": "user", "user_views": "user",
    "device": "context", "price": "context", "city": "context", "user_city_rate": "context",
}  # fmt: skip


def build(config: dict[str, Any], item: str | None = "item") -> tuple[Any, EncoderPlan]:
    specs = [FeatureSpec(name, "int64", role) for name, role in ROLES.items()]
    specs += [FeatureSpec(name, "int64", "context") for name in ("age_device", "shop_device")]
    columns = [ColumnEncoding(name, name, "int64") for name in ROLES]
    for first in ("age", "shop"):
        inputs = (RawColumn(first, "int64"), RawColumn("device", "int64"))
        name = f"{first}_device"
        columns.append(ColumnEncoding(name, first, "int64", f"cross:{name}", Cross(9), inputs))
    schema = FeatureSchema(tuple(specs))
    source = SimpleNamespace(config=config)
    manifest = SimpleNamespace(
        schema=schema,
        keys=DatasetKeys(
            user="user", item=item, history=None, seen=None, candidates=None, label=None
        ),
        source=source,
    )
    return manifest, EncoderPlan(schema, tuple(columns), ())


def test_columns_of_items_come_from_joins_and_rates_too() -> None:
    manifest, plan = build(CONFIG)
    assert find_item_columns(manifest, plan) == {
        "item", "item_views", "shop", "price", "city", "user_city_rate",
    }  # fmt: skip
    names = [spec.name for spec in manifest.schema.features]
    assert find_pair_features(manifest, plan, names) == (
        "price", "city", "user_city_rate", "shop_device",
    )  # fmt: skip


@pytest.mark.parametrize("config", [{}, {"joins": None, "rolling": None}])
def test_imported_records_say_nothing_of_columns(config) -> None:
    manifest, plan = build(config)
    assert find_item_columns(manifest, plan) == {"item", "item_views"}
    assert find_pair_features(manifest, plan, ["price", "shop_device"]) == ()


def test_lists_that_stand_side_by_side_come_from_histories_pairs_and_imports() -> None:
    lists = ("bought", "bought_price", "bought_age", "clicks", "columns", "items", "times", "tags")
    specs = [FeatureSpec(name, "int64", "user", (None,)) for name in lists]
    specs.append(FeatureSpec("clicks_count", "int64", "user"))
    columns = [ColumnEncoding(spec.name, spec.name, "int64") for spec in specs[:-1]]
    columns.append(ColumnEncoding("clicks_count", "clicks", "int64"))
    history = {"name": "bought", "columns": ["price"], "gaps": "s"}
    config = {
        "histories": [history, {"name": "tags", "columns": [], "gaps": None}],
        "sources": {"log": {"columns": [{"name": "clicks", "pair": "columns"}]}},
        "aligned": [["items", "times"]],
    }
    schema = FeatureSchema(tuple(specs))
    manifest: Any = SimpleNamespace(schema=schema, source=SimpleNamespace(config=config))
    assert find_aligned(manifest, EncoderPlan(schema, tuple(columns), ())) == (
        lists[:3], ("clicks", "columns"), ("items", "times"),
    )  # fmt: skip
