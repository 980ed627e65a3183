"""The guide's sources are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from conf.etl import SourceConfig

GUIDE = Path(__file__).parents[3] / "docs/guide/sources.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
SOURCES = {name: source for b in BLOCKS for name, source in yaml.safe_load(b)["sources"].items()}


@pytest.mark.parametrize("name", SOURCES)
def test_the_sources_of_the_guide_are_valid(name):
    config = SourceConfig.model_validate(SOURCES[name])
    assert config.columns
    if name == "clicks":
        assert config.column_types["channels"] == "list<int64>"
