"""The YAML of the guide of samples is accepted as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from conf.etl import (
    BuildConfig,
    DownSamplingConfig,
    LabelConfig,
    NegativesConfig,
    WeightsConfig,
)

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "samples.md"
PARTS = {
    "label": LabelConfig,
    "negatives": NegativesConfig,
    "down_sampling": DownSamplingConfig,
    "weights": WeightsConfig,
}


def test_every_block_of_the_guide_is_a_config():
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    documents: list[Any] = [part for block in blocks for part in yaml.safe_load_all(block)]
    assert BuildConfig.model_validate(documents[0]).history is None
    checked = [
        PARTS[name].model_validate(value)
        for document in documents[1:]
        for name, value in document.items()
    ]
    assert {type(config) for config in checked} == set(PARTS.values())
