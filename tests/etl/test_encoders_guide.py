"""What the guide shows can be typed in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from conf.etl import FeatureConfig
from etl.features import plan_features
from tests.etl.logs import build_config

GUIDE = (Path(__file__).parents[2] / "docs/guide/encoders.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)]
ENCODINGS = re.findall(r"^\| `(\{.*?\})` \|", GUIDE, re.M)


def test_the_first_block_is_a_plan(tmp_path):
    config = build_config(tmp_path, tmp_path, features=BLOCKS[0]["features"])
    assert [f.name for f in plan_features(config).features[:2]] == ["user", "item"]


def test_the_other_features_are_sound():
    for block in BLOCKS[1:]:
        for feature in block["features"]:
            FeatureConfig.model_validate(feature)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_row_of_the_table_is_an_encoding(encoding):
    data = {"name": "x", "column": "y", "role": "user", "encoding": yaml.safe_load(encoding)}
    FeatureConfig.model_validate(data)


def test_the_table_has_every_kind():
    field = FeatureConfig.model_json_schema()["properties"]["encoding"]
    kinds = set(field["discriminator"]["mapping"])
    assert kinds == {yaml.safe_load(encoding)["kind"] for encoding in ENCODINGS}
