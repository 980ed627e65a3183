"""What Sluice costs as data grows: measures parts, and makes docs/scale.md of the records.

    build        so many events, from text to a dataset version, by a Spark that starts cold
    train        an epoch on that version, two towers over dynamic tables
    table        a dynamic table of so many keys: memory, and a step on it
    exchange     so many workers that share a table of a million keys
    traffic      what so many workers would send each other, by the counts of the real plan
    rank, lists  requests with so many candidates; lists out of so many items
    vocabulary   the look-up of so many tokens, which each worker of a build holds

CPU time, bytes and memory count on a busy machine too; wall time does not.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

from tests.bench.measurements import describe_machine
from tests.bench.results.__main__ import read_commit
from tests.bench.scale import serving, spark_build, tables
from tests.bench.scale.page import (
    PAGE,
    describe_costs,
    describe_limits,
    describe_machines,
    fill_page,
)
from tests.bench.scale.plan import Demand, Machine, Plan, Prices, derive_constants
from tests.bench.scale.quantities import COMMANDS, SIZES
from tests.bench.scale.records import FOLDER, ScaleRecord, read_records, write_record

APART = (f"tests/bench/scale/{FOLDER.name}", f"docs/{PAGE.name}")


@dataclass(frozen=True)
class Part:
    """Something that is measured.

    Attributes:
        measure: Takes the size and the command line; returns figures.
        name: Returns the series that a record belongs to.
    """

    measure: Callable[[int, argparse.Namespace], dict[str, float]]
    name: Callable[[argparse.Namespace], str]


def _build(size: int, given: argparse.Namespace) -> dict[str, float]:
    return spark_build.measure_build(size, given.work, given.driver_memory, given.history)


def _name_build(given: argparse.Namespace) -> str:
    usual = given.history == spark_build.HISTORY_LEN
    return "build" if usual else f"build-history{given.history}"


PARTS = {
    "build": Part(_build, _name_build),
    "train": Part(
        lambda size, given: spark_build.measure_train(size, given.work), lambda _: "train"
    ),
    "table": Part(
        lambda size, given: tables.measure_table(size, given.dim, given.optimizer),
        lambda given: f"table-{given.dim}-{given.optimizer}",
    ),
    "exchange": Part(lambda size, _: tables.measure_exchange(size), lambda _: "exchange"),
    "traffic": Part(
        lambda size, given: tables.measure_traffic(size, is_growing=given.growing),
        lambda given: f"traffic-{'growing' if given.growing else 'fixed'}",
    ),
    "rank": Part(lambda size, _: serving.measure_ranking(size), lambda _: "rank"),
    "lists": Part(lambda size, _: serving.measure_lists(size), lambda _: "lists"),
    "vocabulary": Part(lambda size, _: tables.measure_vocabulary(size), lambda _: "vocabulary"),
}
LARGEST_UNASKED = 10_000_000
"""Sizes above it are measured where `--size` asks for them: they take hours, or much memory."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scale", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="measure parts and write a record of each size")
    add = measure.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    add(
        "--size",
        type=int,
        nargs="+",
        help="one record each; default: those of the page up to 10 million",
    )
    add("--work", type=Path, help="folder for logs and versions; a temporary one if not given")
    add("--driver-memory", default="2g", help="of Spark's JVM (default 2g)")
    add("--history", type=int, default=spark_build.HISTORY_LEN,
        help="items of a history in builds (default %(default)s)")  # fmt: skip
    add("--dim", type=int, default=8, help="numbers of a table's row (default 8)")
    add("--optimizer", choices=sorted(tables.STATE), default="sgd", help="of the table")
    add("--growing", action="store_true", help="traffic: the batch grows with the workers")
    plan = commands.add_parser("plan", help="what the model says for another demand")
    plan.add_argument("settings", nargs="*", metavar="NAME=NUMBER",
                      help=f"of {', '.join(_list_settings())}")  # fmt: skip
    commands.add_parser("page", help=f"write the tables of docs/{PAGE.name} from the records")
    return parser


ASSUMED = (Prices(), Machine(), Demand())


def _list_settings() -> list[str]:
    return [field.name for given in ASSUMED for field in fields(given)]


def read_settings(settings: Sequence[str]) -> tuple[Prices, Machine, Demand]:
    """Returns what is assumed, with some of it replaced.

    Args:
        settings: `name=number` of any of the three.

    Raises:
        ValueError: A name is unknown, or its value is no number above 0.
    """
    chosen = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in _list_settings():
            raise ValueError(f"{setting!r}: there are {', '.join(_list_settings())}")
        try:
            chosen[name] = float(number)
        except ValueError:
            raise ValueError(f"{setting!r}: give a number, such as {name}=100") from None
        if not 0 < chosen[name] < math.inf:
            raise ValueError(f"{setting!r}: give a number above 0")
    prices, machine, demand = ASSUMED
    return _replace(prices, chosen), _replace(machine, chosen), _replace(demand, chosen)


T = TypeVar("T", Prices, Machine, Demand)


def _replace(given: T, chosen: Mapping[str, float]) -> T:
    """Returns it with the chosen numbers, those of whole numbers as such."""
    known = {field.name: getattr(given, field.name) for field in fields(given)}
    return replace(given, **{k: type(known[k])(v) for k, v in chosen.items() if k in known})


def main() -> int:
    """Returns the exit code."""
    parser = build_parser()
    given = parser.parse_args()
    if given.command == "measure":
        unknown = sorted(set(given.parts) - set(PARTS))
        if unknown:
            parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
        if any(size < 1 for size in given.size or ()):
            parser.error("--size must be 1 or more")
        try:
            list_runs(given)
        except ValueError as error:
            parser.error(str(error))
        commit = read_commit(*APART)
        if commit is None:
            parser.error("the checkout has changes: commit them, a record names its commit")
        _measure(given, commit)
    if given.command == "plan":
        try:
            print(render_plan(read_settings(given.settings)))
        except (ValueError, LookupError) as error:
            parser.error(str(error))
        return 0
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
    return 0


def render_plan(assumed: tuple[Prices, Machine, Demand]) -> str:
    """Returns the tables of costs, machines and limits."""
    prices, machine, demand = assumed
    plan = Plan(derive_constants(read_records()), demand, machine)
    tables = describe_costs(plan, prices), describe_machines(plan), describe_limits(plan)
    return "\n\n".join(tables)


def list_runs(given: argparse.Namespace) -> list[tuple[str, int, argparse.Namespace]]:
    """Returns part, size and command line of each record that is asked for.

    Where no part is named, these are all series that the page wants.

    Raises:
        ValueError: A part is measured in a shape that the page does not know, at no size.
    """
    commands = [(name, given) for name in given.parts]
    if not commands:
        for words in COMMANDS.values():
            one = build_parser().parse_args(["measure", *words.split()])
            one.work, one.driver_memory = given.work, given.driver_memory
            commands.append((one.parts[0], one))
    return [
        (name, size, one)
        for name, one in commands
        for size in given.size or _find_sizes(PARTS[name].name(one))
    ]


def _find_sizes(series: str) -> list[int]:
    if series not in SIZES:
        raise ValueError(f"say by --size what sizes of {series} to measure")
    return [size for size in SIZES[series] if size <= LARGEST_UNASKED]


def _measure(given: argparse.Namespace, commit: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sluice-scale-") as folder:
        given.work = (given.work or Path(folder)).resolve()
        for name, size, one in list_runs(given):
            print(write_record(measure_record(name, size, one, commit)), flush=True)


def measure_record(name: str, size: int, given: argparse.Namespace, commit: str) -> ScaleRecord:
    """Measures one part at one size.

    Args:
        name: Of the part.
        size: Of what it counts.
        given: The command line.
        commit: Of this checkout.
    """
    machine, part = describe_machine(), PARTS[name]
    return ScaleRecord(
        series=part.name(given), size=size, figures=part.measure(size, given),
        command=describe_command(name, size, given), commit=commit,
        processor=machine["processor"], cores=machine["cores"], load=machine["load_1_min"],
        measured_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )  # fmt: skip


_OPTIONS = {
    "build": ("driver_memory", "history"), "table": ("dim", "optimizer"), "traffic": ("growing",),
}  # fmt: skip


def describe_command(name: str, size: int, given: argparse.Namespace) -> str:
    """Returns the command that measures one record, without the folder that it works in."""
    words = [f"python -m tests.bench.scale measure {name} --size {size}"]
    for option in _OPTIONS.get(name, ()):
        value = getattr(given, option)
        flag = f"--{option.replace('_', '-')}"
        words += [flag] if value is True else [] if value is False else [f"{flag} {value}"]
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
