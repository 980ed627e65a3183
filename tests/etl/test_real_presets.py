"""Presets of real data sets, where the machine has them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from conf.etl import BuildConfig
from conf.load import load_config
from etl.build import BuildResult, build_dataset
from tests.etl.reading import read_sparse

ROWS = {
    "criteo": ("criteo-10k", {"train": 10_000}, 2_182 / 10_000),
    "diginetica": ("diginetica-coder", {"train": 77_929, "test": 51_953}, 1 / 5),
    "ml_1m": (
        "ml-1m",
        {"train": 993_657, "validation": 512, "test": 6_040},
        575_281 / 1_000_209,
    ),
    "frappe": ("frappe/nfm", {"train": 202_027, "validation": 57_722, "test": 28_860}, 1 / 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_preset_accounts_for_every_row(spark, data_dir, tmp_path, name):
    folder, rows, label_rate = ROWS[name]
    overrides = [f"data_dir={data_dir / folder}", f"output.root={tmp_path}"]
    result = build_dataset(spark, load_config(BuildConfig, "etl", name, overrides))
    manifest, counts = result.manifest, result.manifest.counts
    assert not any(counts.quarantined.values())
    assert counts.dropped == {}
    assert counts.joined == sum(rows.values())
    events = sum(counts.kept[s] for s in ("train", "validation", "test"))
    assert events == counts.joined + sum(counts.drawn.values())
    assert manifest.label_rate["train"] == pytest.approx(label_rate, abs=0.02)
    if name == "frappe":
        assert_holds_the_lines(result, data_dir / folder / "frappe.test.libfm")


def assert_holds_the_lines(result: BuildResult, path: Path) -> None:
    """TensorFlow reads of the test split what the libfm file says, index by index."""
    found = Counter(read_sparse(result, "test", label="used"))
    expected: Counter[tuple[float, tuple[tuple[int, float], ...]]] = Counter()
    for line in path.read_text().splitlines():
        label, *pairs = line.split()
        entries = (pair.split(":") for pair in pairs)
        # Ids 0 and 1 are padding and unknown: an index of the file stands two places later.
        row = tuple(sorted((int(index) + 2, float(value)) for index, value in entries))
        expected[(float(label == "1"), row)] += 1
    assert found == expected
