"""Each preset of training in a short form, on a small made log of the form that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.run import METRICS_FILE, read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.load import load_config
from etl.build import BuildResult, build_dataset
from jobs.cli import main
from tests.e2e.preset_samples import SAMPLES

SMALL = ("fit.max_steps=160", "input.batch_size=64", "optimizer.learning_rate=0.02")
MORE = ("fit.epochs=20", *SMALL[1:])
# A transformer learns nothing at that rate.
SLOWER = ("fit.max_steps=400", "input.batch_size=64", "optimizer.learning_rate=0.003")
LONGER = ("fit.max_steps=1000", *SLOWER[1:])
# On so few rows log loss is best before a model has learned.
BY_AUC = (*LONGER, "fit.early_stopping.metric=auc")
SEQUENCES = ("fit.max_steps=120", "input.batch_size=64", "optimizer.learning_rate=0.01")


@dataclass(frozen=True)
class Training:
    """How a preset of a training is tried.

    Attributes:
        log: Preset of the build.
        metric: That tells whether it has learned.
        settings: Of the short form.
    """

    log: str
    metric: str
    settings: tuple[str, ...] = SMALL


CHOSEN = (
    "fit.epochs=4",
    "fit.refit.space={model.temperature: [0.2, 0.1]}",
    "input.batch_size=64",
    "optimizer.learning_rate=0.02",
)
CHOSEN_DROPOUT = (
    "fit.epochs=8",
    "fit.refit.space={model.dropout: [0.5, 0.2]}",
    "input.batch_size=16",
    "model.embedding_dim=64",
    "optimizer.learning_rate=0.005",
)
TRAININGS = {
    "a9a": Training("a9a", "auc"),
    "clicks": Training("clicks", "auc", SLOWER),
    "clicks_columns": Training("clicks_columns", "ndcg@5", MORE),
    "clicks_columns_dssm": Training("clicks_columns", "ndcg@5", MORE),
    "criteo": Training("criteo", "auc"),
    "demo": Training("demo", "ndcg@10"),
    "diginetica": Training("diginetica", "auc", BY_AUC),
    "diginetica_columns": Training("diginetica_columns", "ndcg@10"),
    "diginetica_columns_dssm": Training("diginetica_columns", "ndcg@10"),
    "frappe": Training("frappe", "auc"),
    "ipinyou": Training("ipinyou", "auc"),
    "ml_100k_pairs": Training("ml_100k_pairs", "recall@20"),
    "ml_1m_dssm": Training("ml_1m", "hit_rate@50"),
    "ml_1m_hstu": Training("ml_1m_sequences", "hit_rate@10", SEQUENCES),
    "ml_1m_ligr": Training("ml_1m_sequences", "hit_rate@10", SEQUENCES),
    "ml_1m_mf": Training("ml_1m", "hit_rate@50", MORE),
    "ml_1m_ncf_mf": Training("ml_1m_ncf", "hit_rate@10", LONGER),
    "ml_1m_ratings": Training("ml_1m_ratings", "rmse"),
    "ml_1m_sasrec": Training("ml_1m_sasrec", "hit_rate@10", SEQUENCES),
    "ml_1m_sequences": Training("ml_1m_sequences", "hit_rate@50", SEQUENCES),
    "pairs": Training("pairs", "recall@20", settings=CHOSEN),
    "sequences": Training("sequences", "hit_rate@10", settings=CHOSEN_DROPOUT),
}


class Builds:
    """Versions by preset of a build, each built once.

    Args:
        spark: The session.
        folder: Of made logs and of datasets.
        find_real: Returns the data that a preset is for; None: a log is made.
    """

    def __init__(
        self, spark: Any, folder: Path, find_real: Callable[[str], Path | None] = lambda name: None
    ) -> None:
        self._spark, self._folder, self._find_real = spark, folder, find_real
        self._built: dict[str, BuildResult] = {}

    def find_log(self, name: str) -> Path:
        """Where the log of a preset is; made if it is not there."""
        made = self._folder / name
        real = self._find_real(name)
        if real is None and not made.exists():
            SAMPLES[name](made)
        return real or made

    def get(self, name: str) -> BuildResult:
        """The version of a preset."""
        if name not in self._built:
            log = self.find_log(name)
            overrides = [f"data_dir={log}", f"output.root={self._folder / 'datasets'}"]
            config = load_config(BuildConfig, "etl", name, [*overrides, "output.shards=2"])
            self._built[name] = build_dataset(self._spark, config)
        return self._built[name]


@dataclass(frozen=True)
class ShortRun:
    """What a short training came to.

    Attributes:
        run: Its directory.
        value: Of the metric that tells whether it has learned, on the test split.
        floor: What a model that has learned nothing reaches: a constant, or a quarter more
            than random lists.
    """

    run: Path
    value: float
    floor: float


def train_short(name: str, builds: Builds, runs: Path, seed: int) -> ShortRun:
    """Trains a preset in its short form and measures it on the test split.

    Args:
        name: Of the preset.
        builds: Where its dataset comes from.
        runs: Folder of the runs.
        seed: Of the training.
    """
    training = TRAININGS[name]
    built = builds.get(training.log)
    settings = [f"root={runs}", f"seed={seed}", *training.settings]
    chosen = [part for setting in settings for part in ("--set", setting)]
    dataset = str(built.version.parent.parent)
    assert main(["train", name, "--dataset", dataset, "--no-report", *chosen]) == 0
    run = resolve_run(runs / name)
    assert main(["evaluate", "--run", str(run)]) == 0
    value, floor = read_value(read_json(run / METRICS_FILE), training.metric)
    return ShortRun(run, value, floor)


def read_value(measured: dict[str, Any], metric: str) -> tuple[float, float]:
    """The metric of a run, and what a model that has learned nothing reaches."""
    if "tasks" in measured:
        (task,) = measured["tasks"].values()
        return task[metric], task["constant"][metric]
    (headline,) = [p for p in measured["protocols"] if p["name"] == measured["headline"]]
    systems = headline["systems"]
    return systems["model"][metric], 1.25 * systems["random"][metric]
