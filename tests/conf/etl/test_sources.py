"""What a source's declaration may say, and what contradicts itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from conf.etl.build import BuildConfig
from conf.etl.events import EventsConfig, MostFrequentConfig, UserHistoryConfig
from conf.etl.labels import LabelConfig, NegativesConfig, WeightsConfig
from conf.etl.sources import SourceConfig
from conf.etl.split import SplitConfig

INT = {"name": "id", "type": "int64"}
LIST = {"name": "ids", "type": "list<int64>"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None}, "is read from `path`"),
        ({"table": "t"}, "is read from `path`, and from nothing else"),
        ({"format": "table"}, "is read from `table`"),
        ({"format": "parquet", "separator": ","}, "has no separator"),
        ({"format": "json", "header": True}, "has no header"),
        ({"format": "orc", "encoding": "gbk"}, "has no encoding"),
        ({"format": "pattern", "pattern": "(.)", "header": "by_name"}, "by_name"),
        ({"escape": "\\"}, "needs a `quote`"),
        ({"quote": ",", "separator": ",,"}, "must be different"),
        ({"columns": [LIST]}, "needs a separator"),
        ({"columns": [{**INT, "field": "x"}]}, "by_name"),
        ({"columns": [{**INT, "timestamp_format": "epoch_s"}]}, "cannot have"),
        ({"columns": [{**INT, "type": "string", "minimum": 1}]}, "cannot have bounds"),
        (
            {"columns": [{**LIST, "separator": " ", "pair": "b"}]},
            "its pair 'b' needs a `pair_default`",
        ),
        ({"columns": [{**INT, "pair": "b", "pair_default": "x"}]}, "must be int64"),
        ({"columns": [{**INT, "pair": "ID", "pair_default": 0}]}, "declared twice"),
        ({"columns": [{**INT, "pair": "b", "pair_default": 2**63}]}, "beyond int64"),
        ({"format": "libsvm", "columns": [INT]}, "libsvm has label"),
        ({"format": "libsvm", "columns": [{**LIST, "field": "fields"}]}, "libsvm has label"),
        ({"days": {}}, "needs {date} in `path`"),
        ({"days": {"column": "nope"}}, "needs {date} in `path`"),
        ({"days": {"column": "id"}}, "'%Y-%m-%d' gives no whole number, and 'id' is int64"),
        ({"path": "{date}/{date}"}, "more than once"),
        ({"path": "../in"}, r"leads out of the folder of the data by `\.\.`"),
        ({"path": "a/../../in/*.csv"}, "leads out of the folder"),
        ({"path": "file:../in"}, "leads out of the folder"),
        ({"path": "file:%2e%2e/in"}, "leads out of the folder"),
        ({"path": "a/{date}", "days": {"format": "../../%Y-%m-%d"}}, "leads out of the folder"),
        ({"path": "{date}", "days": {"format": "%m-%d"}}, "does not tell year, month and day"),
    ],
)
def test_contradictions_are_refused(changes, message):
    data: dict[str, Any] = {"path": "in", "columns": [INT], **changes}
    if changes.get("format") == "table":
        del data["path"]
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate(data)


@pytest.mark.parametrize("path", ["/a/../in", "file:///a/../in", "~/../in", "a..b/..c", "in/"])
def test_absolute_paths_and_names_with_points_are_taken(path):
    assert SourceConfig.model_validate({"path": path, "columns": [INT]}).path == path


def test_a_sparse_format_brings_its_columns_and_a_dated_path_its_days():
    config = SourceConfig.model_validate({"path": "x/{date}", "format": "libffm"})
    assert list(config.column_types) == ["label", "fields", "indices", "values"]
    assert config.days is not None
    assert config.days.lookback_days == 0


GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "samples.md"
PARTS = {
    "events": EventsConfig,
    "histories": UserHistoryConfig,
    "most_frequent": MostFrequentConfig,
    "label": LabelConfig,
    "negatives": NegativesConfig,
    "weights": WeightsConfig,
    "split": SplitConfig,
}


def test_every_block_of_the_guide_is_a_config():
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    documents: list[Any] = [part for block in blocks for part in yaml.safe_load_all(block)]
    assert BuildConfig.model_validate(documents[0]).histories == ()
    checked = [
        PARTS[name].model_validate(part)
        for document in documents[1:]
        for name, value in document.items()
        if name in PARTS
        for part in (value if isinstance(value, list) else [value])
    ]
    assert {type(config) for config in checked} == set(PARTS.values())
