"""Presets of real data sets, where the machine has them."""

from __future__ import annotations

import pytest

from conf.etl import BuildConfig
from conf.load import load_config
from etl.build import build_dataset

ROWS = {
    "criteo": ("criteo-10k", {"train": 10_000}, 2_182 / 10_000),
    "diginetica": ("diginetica-coder", {"train": 77_929, "test": 51_953}, 1 / 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_preset_accounts_for_every_row(spark, data_dir, tmp_path, name):
    folder, rows, label_rate = ROWS[name]
    overrides = [f"data_dir={data_dir / folder}", f"output.root={tmp_path}"]
    manifest = build_dataset(spark, load_config(BuildConfig, "etl", name, overrides)).manifest
    counts = manifest.counts
    assert not any(counts.quarantined.values())
    assert counts.dropped == {}
    assert counts.joined == sum(rows.values())
    events = sum(counts.kept[s] for s in ("train", "validation", "test"))
    assert events == counts.joined + sum(counts.drawn.values())
    assert manifest.label_rate["train"] == pytest.approx(label_rate, abs=0.02)
