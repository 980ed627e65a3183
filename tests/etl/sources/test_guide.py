"""The guide's sources are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from conf.etl import SourceConfig, SparkConfig

GUIDE = Path(__file__).parents[3] / "docs/guide/sources.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
READ = [yaml.safe_load(block) for block in BLOCKS]
SOURCES = {name: source for b in READ for name, source in b.get("sources", {}).items()}


@pytest.mark.parametrize("name", SOURCES)
def test_the_sources_of_the_guide_are_valid(name):
    config = SourceConfig.model_validate(SOURCES[name])
    assert config.columns
    if name == "clicks":
        assert config.column_types["channels"] == "list<int64>"


def test_the_session_of_the_guide_is_valid():
    (spark,) = [block["spark"] for block in READ if "spark" in block]
    assert "spark-avro" in SparkConfig.model_validate(spark).conf["spark.jars.packages"]
