"""How good the short form of each preset is: stored bands, and the command that measures them.

`python -m tests.e2e.preset_bands` trains what has no band yet; presets that are named are measured
again. How good presets are on the data that they are for stands in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.metrics import is_minimised
from jobs.support.spark_session import build_session
from tests.e2e.short_presets import TRAININGS, Builds, train_short

FILE = Path(__file__).with_name("preset_bands.json")
SEEDS = (42, 43, 44)
# Three seeds know their spread badly, and processors add in other orders.
_DEVIATIONS = 4.0
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class Band:
    """What seeds of a short training gave.

    Attributes:
        metric: That was measured on the test split.
        values: One for each seed.
    """

    metric: str
    values: tuple[float, ...]

    @property
    def bound(self) -> float:
        """The worst value that is no loss: four deviations, at least 1 %, from the mean."""
        mean = statistics.fmean(self.values)
        width = max(_DEVIATIONS * statistics.stdev(self.values), _SMALLEST_SHARE * abs(mean))
        return mean + width if is_minimised(self.metric) else mean - width

    def holds(self, value: float) -> bool:
        """Whether a value is no worse than the bound."""
        return is_better(value, self.bound, self.metric)


def is_better(value: float, bound: float, metric: str) -> bool:
    """Whether a value of a metric is better than a bound."""
    return value < bound if is_minimised(metric) else value > bound


def read_bands() -> dict[str, Band]:
    """The stored bands, by preset."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Band(band["metric"], tuple(band["values"])) for name, band in stored.items()}


def write_band(name: str, band: Band) -> None:
    """Stores a band in place of an older one."""
    bands = {name: asdict(band) for name, band in read_bands().items()}
    bands[name] = asdict(band)
    text = json.dumps(dict(sorted(bands.items())), indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


def measure_band(name: str, builds: Builds, runs: Path) -> Band | None:
    """Trains a preset by each seed; None where what has learned nothing would be in the band."""
    found = [train_short(name, builds, runs / str(seed), seed) for seed in SEEDS]
    metric = TRAININGS[name].metric
    band = Band(metric, tuple(round(run.value, 5) for run in found))
    print(f"{name}: {metric} {band.values}, bound {band.bound:.4f}, floor {found[0].floor:.4f}")
    return band if all(is_better(band.bound, run.floor, metric) for run in found) else None


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.preset_bands", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="those without a band")
    arguments = parser.parse_args()
    if unknown := set(arguments.presets) - set(TRAININGS):
        parser.error(f"no preset of training: {', '.join(sorted(unknown))}")
    config = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "4"}
    spark = build_session(config, "preset bands")
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(spark, Path(folder))
        weak = []
        for name in arguments.presets or sorted(TRAININGS):
            if not arguments.presets and name in read_bands():
                continue
            band = measure_band(name, builds, Path(folder, "runs"))
            if band is None:
                weak.append(name)
            else:
                write_band(name, band)
    if weak:
        print(f"a model that has learned nothing passes too, train longer: {', '.join(weak)}")
    return 1 if weak else 0


if __name__ == "__main__":
    sys.exit(main())
