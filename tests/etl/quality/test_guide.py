"""The guide's contract is one that the demo's preset takes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from conf.etl import BuildConfig
from conf.load import load_config

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "validation.md"


def test_the_guides_contract_fits_the_demo():
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    demo = load_config(BuildConfig, "etl", "demo", []).model_dump(mode="json")
    config = BuildConfig.model_validate({**demo, **yaml.safe_load(block)})
    assert len(config.contract.rules) == 13
    assert config.contract.sources == {"ratings", "users", "movies"}
