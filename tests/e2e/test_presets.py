"""Every preset that ships is built, trained, evaluated and exported, and loses no quality.

Builds read the data that a preset is for, where `SLUICE_DATA` has it; else a small log of the same
form, as the short trainings do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from conf.load import load_config, preset_names
from conf.training.train import TrainConfig
from etl.build import BuildResult
from jobs.cli import main
from tests.e2e.preset_bands import Band, is_better, read_bands
from tests.e2e.preset_samples import SAMPLES
from tests.e2e.short_presets import TRAININGS, Builds, train_short
from tests.real_data import find_data


@dataclass(frozen=True)
class Log:
    """What a preset of a build reads.

    Attributes:
        folder: Of `SLUICE_DATA`; None for what Sluice generates itself.
        rows: Of the real data, by split.
        label_rate: Of its train split.
    """

    folder: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    label_rate: float | None = None


LOGS = {
    "a9a": Log("a9a", {"train": 32_561}, 7_841 / 32_561),
    "clicks": Log(),
    "clicks_columns": Log(),
    "criteo": Log("criteo-10k", {"train": 10_000}, 2_182 / 10_000),
    "demo": Log(),
    "diginetica": Log("diginetica-coder", {"train": 77_929, "test": 51_953}, 1 / 5),
    "diginetica_columns": Log("diginetica-coder"),
    "frappe": Log("frappe/nfm", {"train": 202_027, "validation": 57_722, "test": 28_860}, 1 / 3),
    "ipinyou": Log("ipinyou-deepctr", {"train": 26_773, "test": 21_150}, 255 / 26_773),
    "ml_100k_pairs": Log("ml-100k"),
    "ml_1m": Log(
        "ml-1m", {"train": 993_657, "validation": 512, "test": 6_040}, 575_281 / 1_000_209
    ),
    "ml_1m_ncf": Log("ml-1m-ncf"),
    "ml_1m_ratings": Log("ml-1m", {"train": 1_000_209}, 3.58),
    "ml_1m_sasrec": Log("ml-1m-sasrec", {"train": 8_636, "validation": 6_040, "test": 6_040}),
    "ml_1m_sequences": Log("ml-1m"),
    "pairs": Log(),
    "sequences": Log(),
}


def test_every_preset_that_ships_is_tried() -> None:
    assert sorted(LOGS) == sorted(SAMPLES) == preset_names("etl")
    assert sorted(TRAININGS) == preset_names("training")
    read = {name: load_config(TrainConfig, "training", name).dataset for name in TRAININGS}
    assert {name: f"work/datasets/{t.log}" for name, t in TRAININGS.items()} == read


@pytest.fixture(scope="module")
def builds(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(spark, tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def real_builds(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(spark, tmp_path_factory.mktemp("real"), find_real)


def find_real(name: str) -> Path | None:
    folder = LOGS[name].folder
    return find_data(folder) if folder else None


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_build_accounts_for_every_row(real_builds: Builds, name: str) -> None:
    built, is_real = real_builds.get(name), find_real(name) is not None
    counts = built.manifest.counts
    assert counts.kept["train"] > 0
    assert sum(counts.kept[split] for split in ("train", "validation", "test")) > 0
    if is_real and LOGS[name].rows:
        rows, inside = LOGS[name].rows, counts.dropped.get("inside_sequence", 0)
        assert not any(counts.quarantined.values())
        assert sum(counts.dropped.values()) == inside
        assert counts.joined == sum(rows.values()) + inside
        events = sum(counts.kept[s] for s in ("train", "validation", "test"))
        assert events == counts.joined - inside + sum(counts.drawn.values())
        rate = built.manifest.label_rate.get("train")
        assert rate == pytest.approx(LOGS[name].label_rate, abs=0.02)
    if name == "frappe":
        assert_holds_the_lines(built, real_builds.find_log(name) / "frappe.test.libfm")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_a_training_is_as_good_as_ever_and_is_exported(
    builds: Builds, tmp_path: Path, name: str
) -> None:
    short = train_short(name, builds, tmp_path / "runs", seed=42)
    band = read_bands()[name]
    assert band.holds(short.value), f"{band.metric} {short.value:.4f}, bound {band.bound:.4f}"
    assert is_better(short.value, short.floor, band.metric)
    assert main(["export", "--run", str(short.run), "--to", str(tmp_path / "models")]) == 0
    served = tf.saved_model.load(str(tmp_path / "models" / name / "1"))
    assert "serving_default" in served.signatures


def test_every_preset_has_a_band() -> None:
    found = {name: band.metric for name, band in read_bands().items()}
    assert found == {name: training.metric for name, training in TRAININGS.items()}


def test_a_band_refuses_what_is_worse_than_its_seeds() -> None:
    gain, error = Band("auc", (0.80, 0.81, 0.82)), Band("rmse", (0.90, 0.90, 0.90))
    assert gain.bound == pytest.approx(0.77)
    assert error.bound == pytest.approx(0.909)
    assert gain.holds(0.78)
    assert gain.holds(0.99)
    assert not gain.holds(0.76)
    assert error.holds(0.908)
    assert error.holds(0.5)
    assert not error.holds(0.91)


def read_sparse(
    result: BuildResult, split: str, label: str
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Label and sorted (index, value) pairs of each record, as TensorFlow's `SparseTensor`."""
    size = result.manifest.schema["indices"].vocabulary_size
    features = {
        "row": tf.io.SparseFeature("indices", "values", tf.float32, size),
        label: tf.io.FixedLenFeature([], tf.float32),
    }
    shards = [str(result.version / s.path) for s in result.manifest.split(split).shards]
    rows = []
    for batch in tf.data.TFRecordDataset(shards).batch(4096):
        parsed = tf.io.parse_example(batch, features)
        own: list[list[tuple[int, float]]] = [[] for _ in range(len(batch))]
        places, values = parsed["row"].indices.numpy(), parsed["row"].values.numpy()
        for (row, index), value in zip(places.tolist(), values.tolist(), strict=True):
            own[row].append((index, value))
        labels = parsed[label].numpy().tolist()
        rows += [(one, tuple(sorted(pairs))) for one, pairs in zip(labels, own, strict=True)]
    return rows


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
