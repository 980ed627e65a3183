"""Every preset that ships is built, trained, evaluated and exported.

On the data that it is for, where `SLUICE_DATA` has it; else on a small log of the same form.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.load import load_config, preset_names
from conf.training.train import TrainConfig
from etl.build import BuildResult, build_dataset
from jobs.cli import main
from tests.e2e.preset_samples import SAMPLES
from tests.etl.built_versions import read_sparse
from tests.real_data import find_data

SMALL = ("fit.max_steps=160", "input.batch_size=64", "optimizer.learning_rate=0.02")
# A transformer learns nothing at that rate.
SLOWER = ("fit.max_steps=400", "input.batch_size=64", "optimizer.learning_rate=0.003")
LONGER = ("fit.max_steps=1000", *SLOWER[1:])
SEQUENCES = ("fit.max_steps=120", "input.batch_size=64", "optimizer.learning_rate=0.01")


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
}


@dataclass(frozen=True)
class Training:
    """How a preset of a training is tried.

    Attributes:
        log: Preset of the build.
        metric: That tells whether it has learned.
        real: Its bound on real data; None for half as much again as random lists have, and
            for an error that is 2 % below that of a constant.
        made: The same on made data.
        settings: For made data.
        real_settings: For real data.
    """

    log: str
    metric: str
    real: float | None = None
    made: float | None = None
    settings: tuple[str, ...] = SMALL
    real_settings: tuple[str, ...] = ("fit.epochs=2",)


FEW = ("fit.max_steps=300",)
CHOSEN = (
    "fit.epochs=4",
    "fit.refit.space={model.temperature: [0.2, 0.1]}",
    "input.batch_size=64",
    "optimizer.learning_rate=0.02",
)
FEW_PIECES = ("fit.max_steps=60", "optimizer.learning_rate=0.005")
TRAININGS = {
    "a9a": Training("a9a", "auc", 0.88, 0.7),
    "clicks": Training("clicks", "auc", None, 0.6, SLOWER),
    "clicks_columns": Training("clicks_columns", "ndcg@5"),
    "clicks_columns_dssm": Training("clicks_columns", "ndcg@5"),
    "criteo": Training("criteo", "auc", 0.65, 0.6),
    "demo": Training("demo", "ndcg@10"),
    "diginetica": Training("diginetica", "auc", 0.505, 0.6, LONGER),
    "diginetica_columns": Training("diginetica_columns", "ndcg@10", real_settings=FEW),
    "diginetica_columns_dssm": Training("diginetica_columns", "ndcg@10", real_settings=FEW),
    "frappe": Training("frappe", "auc", 0.93, 0.6),
    "ipinyou": Training("ipinyou", "auc", 0.5, 0.6),
    "ml_100k_pairs": Training("ml_100k_pairs", "recall@20"),
    "ml_1m_dssm": Training("ml_1m", "hit_rate@50", real_settings=FEW),
    "ml_1m_hstu": Training("ml_1m_sequences", "hit_rate@10", None, None, SEQUENCES, FEW_PIECES),
    "ml_1m_mf": Training("ml_1m", "hit_rate@50", real_settings=FEW),
    "ml_1m_ncf_mf": Training("ml_1m_ncf", "hit_rate@10", 0.01, None, LONGER, ("fit.epochs=1",)),
    "ml_1m_ratings": Training("ml_1m_ratings", "rmse", 0.95, None),
    "ml_1m_sasrec": Training("ml_1m_sasrec", "hit_rate@10", None, None, SEQUENCES, FEW_PIECES),
    "ml_1m_sasrec_hstu": Training("ml_1m_sasrec", "hit_rate@10", None, None, SEQUENCES, FEW_PIECES),
    "ml_1m_sasrec_ligr": Training("ml_1m_sasrec", "hit_rate@10", None, None, SEQUENCES, FEW_PIECES),
    "ml_1m_sequences": Training(
        "ml_1m_sequences", "hit_rate@50", None, None, SEQUENCES, FEW_PIECES
    ),
    "pairs": Training("pairs", "recall@20", settings=CHOSEN),
}


def test_every_preset_that_ships_is_tried() -> None:
    assert sorted(LOGS) == sorted(SAMPLES) == preset_names("etl")
    assert sorted(TRAININGS) == preset_names("training")
    read = {name: load_config(TrainConfig, "training", name).dataset for name in TRAININGS}
    assert {name: f"work/datasets/{t.log}" for name, t in TRAININGS.items()} == read


class Builds:
    """Versions by preset, each built once."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self._built: dict[str, BuildResult] = {}

    def find_log(self, name: str) -> Path:
        """Where the log of a preset is; made if it is not there."""
        folder = LOGS[name].folder
        real = find_data(folder) if folder else None
        made = self._folder / name
        if real is None and not made.exists():
            SAMPLES[name](made)
        return real or made

    def get(self, name: str) -> tuple[BuildResult, bool]:
        """The version of a preset, and whether it is of real data."""
        log = self.find_log(name)
        if name not in self._built:
            overrides = [f"data_dir={log}", f"output.root={self._folder / 'datasets'}"]
            config = load_config(BuildConfig, "etl", name, [*overrides, "output.shards=2"])
            self._built[name] = build_dataset(self._spark, config)
        return self._built[name], log != self._folder / name


@pytest.fixture(scope="module")
def builds(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(spark, tmp_path_factory.mktemp("presets"))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_build_accounts_for_every_row(builds: Builds, name: str) -> None:
    built, is_real = builds.get(name)
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
        assert_holds_the_lines(built, builds.find_log(name) / "frappe.test.libfm")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_a_training_learns_and_is_exported(builds: Builds, tmp_path: Path, name: str) -> None:
    trained = TRAININGS[name]
    built, is_real = builds.get(trained.log)
    settings = [f"root={tmp_path / 'runs'}"]
    settings += trained.real_settings if is_real else trained.settings
    chosen = [part for setting in settings for part in ("--set", setting)]
    dataset = str(built.version.parent.parent)
    assert main(["train", name, "--dataset", dataset, "--no-report", *chosen]) == 0
    run = resolve_run(tmp_path / "runs" / name)
    assert main(["evaluate", "--run", str(run)]) == 0
    assert_has_learned(read_json(run / "metrics.json"), trained, is_real)
    assert main(["export", "--run", str(run), "--to", str(tmp_path / "models")]) == 0
    served = tf.saved_model.load(str(tmp_path / "models" / name / "1"))
    assert "serving_default" in served.signatures


def assert_has_learned(found: dict[str, Any], trained: Training, is_real: bool) -> None:
    """A metric of the test split is beyond its bound, or beyond that of random lists."""
    bound, metric = trained.real if is_real else trained.made, trained.metric
    if "tasks" in found:
        (values,) = found["tasks"].values()
        if metric == "rmse":
            bound = bound or 0.98 * values["constant"]["rmse"]
    else:
        (headline,) = [p for p in found["protocols"] if p["name"] == found["headline"]]
        values = headline["systems"]["model"]
        bound = bound or 1.5 * headline["systems"]["random"][metric]
    print(f"{metric} {values[metric]:.4f}, bound {bound}")
    assert bound is not None
    assert values[metric] < bound if metric == "rmse" else values[metric] > bound


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
