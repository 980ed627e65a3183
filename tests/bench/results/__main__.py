"""Quality of presets: trains them on public data, records what finished runs wrote, makes the page.

`run` goes on where it was killed: finished builds and runs of the same config are used again.
Seeds are added to the record of the same rows and settings.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from conf.artefacts.dataset import resolve_version
from conf.artefacts.run import resolve_run
from conf.load import load_config
from conf.training.train import TrainConfig
from tests.bench.measurements import describe_machine
from tests.bench.results.experiments import BY_NAME, Experiment
from tests.bench.results.origins import keep_origin, note_origin
from tests.bench.results.page import PAGE, render_page
from tests.bench.results.records import (
    OTHER_SETUP,
    Record,
    RefusedError,
    SeedResult,
    build_record,
    find_oldest_of_same_rows,
    find_other_seeds,
    read_records,
    read_seed,
    write_record,
)
from tests.real_data import VARIABLE, find_data
from training.run_directory import run_paths


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.results", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="build, train, evaluate, record")
    run.add_argument("experiments", nargs="+", choices=sorted(BY_NAME), metavar="PRESET")
    run.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    run.add_argument("--work", type=Path, default=Path("work/results"), help="datasets and runs")
    commands.add_parser("page", help=f"write {PAGE.name} from the records")
    return parser


def main() -> int:
    """Returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args()
    if arguments.command == "run":
        commit = read_commit(*APART)
        if commit is None:
            parser.error("the checkout has changes: commit them, a record names its commit")
        for name in arguments.experiments:
            folder = find_log(BY_NAME[name], arguments.work)
            if folder is None:
                parser.error(f"{name} needs {BY_NAME[name].data} below ${VARIABLE}")
            try:
                measure(BY_NAME[name], folder, arguments, commit)
            except RefusedError as error:
                parser.error(str(error))
    PAGE.write_text(render_page(read_records()), encoding="utf-8")
    return 0


APART = ("tests/bench/results/measured", f"docs/{PAGE.name}")


def read_commit(*apart: str) -> str | None:
    """The commit of this checkout; None where a tracked file is changed, but for these paths."""
    paths = (".", *(f":!{path}" for path in apart))
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return None if changed else _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def find_log(experiment: Experiment, work: Path) -> Path | None:
    """Folder of the log that a preset is measured on; the generated one is made where it lacks."""
    if experiment.data is not None:
        return find_data(experiment.data)
    folder = work / "clicks_log"
    if not folder.exists():
        _sluice("data", "clicks", "--out", str(folder), "--sessions", "20000")
    return folder


def measure(experiment: Experiment, log: Path, arguments: argparse.Namespace, commit: str) -> None:
    """Builds, trains and evaluates one preset and writes its record.

    Raises:
        RefusedError: The record would lose seeds, or name a commit that has not trained one.
    """
    work: Path = arguments.work.resolve()
    build = Path(load_config(TrainConfig, "training", experiment.preset).dataset).name
    dataset = work / "datasets" / build
    # Builds nothing where neither the config nor the log has changed; a log that was copied again
    # gives another version of the same rows, and runs go on with the one that they began on.
    _sluice("build", build, "--data", str(log), "--set", f"output.root={dataset.parent}")
    _sluice("versions", "rollback", str(dataset), "--to", find_oldest_of_same_rows(dataset))
    machine = describe_machine()
    here = {"commit": commit, "processor": ", ".join((machine["processor"], *machine["gpus"]))}
    version, numbers = resolve_version(dataset), sorted({*arguments.seeds})
    _check_record(build_record(experiment, version), numbers)
    plans = [_plan(experiment, dataset, number) for number in numbers]
    origins = [note_origin(plan.config, here) for plan in plans]
    seeds = [_train(experiment, *planned) for planned in zip(plans, origins, strict=True)]
    print(write_record(build_record(experiment, version, seeds)))


def _check_record(record: Record, seeds: list[int]) -> None:
    """Refuses before hours of training what would be refused after them."""
    find_other_seeds(record, seeds)
    stored = read_records().get(record.experiment, record)
    if not record.takes_seeds_of(stored):
        print(f"{record.experiment}: its record is of other {OTHER_SETUP}, and will be replaced")


@dataclass(frozen=True)
class _Plan:
    """The run of one seed: what is set beside its preset, and the config that this makes."""

    settings: tuple[str, ...]
    config: TrainConfig


def _plan(experiment: Experiment, dataset: Path, seed: int) -> _Plan:
    root, name = dataset.parent.parent / "runs", f"{experiment.name}_seed{seed}"
    own = (f"dataset={dataset}", f"root={root}", f"name={name}", f"seed={seed}")
    settings = (*own, *experiment.settings)
    return _Plan(settings, load_config(TrainConfig, "training", experiment.preset, settings))


def _train(experiment: Experiment, plan: _Plan, origin: Path) -> SeedResult:
    """One seed, trained where that has not been done."""
    words = [word for setting in plan.settings for word in ("--set", setting)]
    _sluice("train", experiment.preset, *words, "--once", "--no-report")
    run = resolve_run(str(run_paths(plan.config).base))
    made_by = keep_origin(origin, run)
    _sluice("evaluate", "--run", str(run))
    return read_seed(experiment, run, made_by)


def _sluice(*words: str) -> None:
    """Runs a command of this checkout; its output goes to this one's.

    Raises:
        SystemExit: It has failed, and has said why; the same code.
    """
    here = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(here)}
    command = [sys.executable, "-m", "jobs.cli", *words]
    if code := subprocess.run(command, check=False, env=environment).returncode:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
