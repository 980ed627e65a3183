"""Keys of dynamic tables: find, count and touch, sweeps, what a step pays for rules and tiers."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from rich.console import Console

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

from conf.schema import FIRST_TOKEN_ID
from conf.training.tables import DynamicTableConfig, EvictionConfig
from tests.bench.clock import pin_to_one_core
from tests.bench.measurements import (
    Bar,
    BenchReport,
    Measurement,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    judge,
    print_report,
    run_bench,
)
from tests.bench.train_step.sections import StepSettings, judge_wall_time, time_in_turns
from tests.bench.train_step.trainings import BatchShape, SluiceTraining, build_dynamic_table
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_rules import RuledIndex
from training.embedding.key_space import KeySpace

SECTIONS = ("index", "sweep", "step", "tier")
IN_FLIGHT = 8
"""Batches that the input is ahead of the steps."""
LOOKUPS_PER_S, OVER_DICTIONARY, KEY_BYTES, SWEEP_S, STEP_SHARE = 15e6, 20.0, 48.0, 0.5, 1.25
TIER_SHARE = 1.6
DICTIONARY_SHARE = 50
"""The dictionary looks up so many times fewer keys."""
BATCH_KEYS = 100_000
SWEEP_STEPS = 1000
TIER_BATCHES, TIER_WARM_UP = 256, 80
"""Batches of the stream, and steps until the device has the rows that it will have."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("embedding", __doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--keys", type=int, default=10_000_000, help="index: known keys, and lookups")
    add("--exponent", type=float, default=1.0, help="index: of Zipf's law")
    add("--swept", type=int, default=16_000_000, help="sweep: known keys")
    add("--rows", type=int, default=1_000_000, help="step: keys of the batches")
    add("--tiered", type=int, default=10_000_000, help="tier: rows of the table")
    add("--device", type=int, default=1_000_000, help="tier: rows of it on the device")
    add("--batch", type=int, default=2048, help="step, tier: rows of a batch")
    add("--length", type=int, default=50, help="step, tier: items of a history")
    add("--dim", type=int, default=32, help="step, tier, dictionary: numbers of a row")
    add("--repeats", type=int, default=5, help="rounds of each, in turns; the fastest counts")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    names = ("keys", "swept", "rows", "tiered", "device", "batch", "length", "dim", "repeats")
    check_positive(parser, arguments, names)


def build_index(keys: np.ndarray, **rules: object) -> RuledIndex:
    """Returns an index that has met keys, as many as there are."""
    index = RuledIndex("items", DynamicTableConfig.model_validate(rules), seed=1)
    for part in np.array_split(keys, max(1, len(keys) // BATCH_KEYS)):
        map_batch(index, part)
    return index


def map_batch(index: RuledIndex, keys: np.ndarray) -> np.ndarray:
    """Maps a batch, with as many in flight as in training; times are numbers of batches."""
    times = np.full(len(keys), index.moment + 1)
    rows = index.map(keys, times if index.timestamp else None).rows
    index.trim(index.counters.batches - IN_FLIGHT)
    return rows


def draw_zipf(keys: np.ndarray, count: int, exponent: float) -> np.ndarray:
    """Draws keys by Zipf's law over their order."""
    rng = np.random.default_rng(5)
    share = np.cumsum(np.arange(1, len(keys) + 1, dtype=np.float64) ** -exponent)
    return keys[np.searchsorted(share, rng.random(count) * share[-1])]


def measure_index(report: BenchReport, arguments: argparse.Namespace) -> list[Measurement]:
    """Looks keys up, counts them and notes their time, on one core; a dictionary of vectors too."""
    keys = np.random.default_rng(1).permutation(arguments.keys).astype(np.int64) * 0x9E3779B97F4B
    keys += 1
    shape = f"{arguments.keys:,} keys, Zipf {arguments.exponent:g}"
    drawn = draw_zipf(keys, arguments.keys, arguments.exponent)
    batches = np.array_split(drawn, max(1, len(drawn) // BATCH_KEYS))
    rules = {"count": 2}, {"timestamp": "time", "unused_time": 1 << 40, "every": 1 << 30}
    found = []
    with pin_to_one_core():
        index = build_index(np.repeat(keys, 2), admission=rules[0], eviction=rules[1])
        best = min(_time_batches(index, batches) for _ in range(arguments.repeats))
        found.append(Measurement("index", shape, "find + count + touch", *best, len(drawn)))
        found[0].details["bytes_per_key"] = index.bytes / len(index.records)
        few = np.concatenate(batches[::DICTIONARY_SHARE])
        vectors = {key: np.zeros(arguments.dim, np.float32) for key in set(few.tolist())}
        best = min(_time_dictionary(vectors, few) for _ in range(arguments.repeats))
        found.append(Measurement("index", shape, "dictionary of vectors", *best, len(few)))
    report.measurements += found
    bars = [Bar(found[0].name, found[1].name, OVER_DICTIONARY)]
    report.verdicts += judge(shape, found, bars)
    return found


def _time_batches(index: RuledIndex, batches: list[np.ndarray]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        map_batch(index, batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def _time_dictionary(vectors: dict[int, np.ndarray], keys: np.ndarray) -> tuple[float, float]:
    """The same lookups as rows of vectors, which is what a dictionary is used for."""
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in np.array_split(keys, max(1, len(keys) // BATCH_KEYS)):
        np.stack([vectors[key] for key in batch.tolist()])
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_sweep(report: BenchReport, arguments: argparse.Namespace) -> list[Measurement]:
    """Evicts a tenth of all keys: at once, and spread over steps that map a batch each."""
    shape = f"{arguments.swept:,} keys, a tenth of them due"
    keys = np.arange(1, arguments.swept + 1, dtype=np.int64) * 0x9E3779B97F4B
    step_keys = keys[-BATCH_KEYS // 10 :]
    found = []
    with pin_to_one_core():
        last = -(-len(keys) // BATCH_KEYS)
        unused = last - max(1, last // 10)
        clock = {"timestamp": "time", "unused_time": unused}
        index = build_index(keys, eviction={**clock, "every": "epoch"})
        now = np.full(len(step_keys), index.moment + 1)
        wall, cpu = time.perf_counter(), time.process_time()
        index.map(step_keys, now, is_last=True)
        times = time.perf_counter() - wall, time.process_time() - cpu
        found.append(Measurement("sweep", shape, "all at once", *times, len(keys)))
        found[0].details["evicted"] = index.counters.evicted
        rules = {**clock, "unused_time": unused + SWEEP_STEPS // 2, "every": SWEEP_STEPS}
        index.eviction = EvictionConfig.model_validate(rules)  # one index is enough memory
        steps = [_time_batches(index, [step_keys]) for _ in range(SWEEP_STEPS)]
    cpu_ms = 1e3 * np.array([cpu for _, cpu in steps])
    totals = sum(wall for wall, _ in steps), sum(cpu for _, cpu in steps)
    spread_over = Measurement(
        "sweep", shape, f"spread over {SWEEP_STEPS} steps", *totals, len(keys)
    )
    spread_over.details.update(
        median_ms=float(np.median(cpu_ms)),
        p99_ms=float(np.percentile(cpu_ms, 99)),
        max_ms=float(cpu_ms.max()),
    )
    found.append(spread_over)
    report.measurements += found
    return found


def measure_step(report: BenchReport, arguments: argparse.Namespace) -> list[Measurement]:
    """Steps on a dynamic table with admission and eviction, against one without."""
    shape = BatchShape(arguments.batch, arguments.length, arguments.rows)
    settings = StepSettings(arguments.batch, arguments.length, "adagrad", arguments.repeats)
    plain, ruled = "without rules", "admission and eviction"
    new = "; a tenth of the items new"
    trainings = {
        plain: SluiceTraining(_build_plain(arguments), shape.build(), settings.sparse),
        ruled: SluiceTraining(_build_ruled(arguments), shape.build(), settings.sparse),
        plain + new: SluiceTraining(
            _build_plain(arguments), shape.build_arriving(0.1), settings.sparse
        ),
        ruled + new: SluiceTraining(
            _build_ruled(arguments), shape.build_arriving(0.1), settings.sparse
        ),
    }
    found = time_in_turns(
        "step",
        f"{settings.batch} x {settings.length}, {arguments.rows:,} x {arguments.dim}, adagrad",
        trainings,
        batch_rows=settings.batch,
        steps=dict.fromkeys(trainings, 20),
        repeats=settings.repeats,
    )
    report.measurements += found
    bars = [Bar(ruled + kind, plain + kind, STEP_SHARE, at_least=False) for kind in ("", new)]
    report.verdicts += judge_wall_time(found, bars)
    return found


def _build_plain(arguments: argparse.Namespace) -> DynamicTable:
    return build_dynamic_table(arguments.dim, arguments.rows)


def _build_ruled(arguments: argparse.Namespace) -> DynamicTable:
    rules = {"admission": {"count": 2}, "eviction": {"min_count": 2, "every": 20}}
    config = DynamicTableConfig.model_validate({**rules, "capacity": arguments.rows})
    return DynamicTable("item", KeySpace("item", config, seed=1), arguments.dim, seed=1)


def measure_tier(report: BenchReport, arguments: argparse.Namespace) -> list[Measurement]:
    """Steps on a table whose rows lie in two tiers, against one that the device holds."""
    rows = arguments.tiered
    batches = BatchShape(arguments.batch, arguments.length, rows, distinct=TIER_BATCHES)
    dataset = batches.build()
    whole, tiered = "all rows on the device", f"{arguments.device:,} of them"
    tables = {
        whole: _build_known(arguments.dim, rows),
        tiered: _build_known(arguments.dim, rows, arguments.device),
    }
    trainings = {name: SluiceTraining(table, dataset, "adagrad") for name, table in tables.items()}
    for training in trainings.values():
        training(TIER_WARM_UP)
    tier = tables[tiered].keys.tier
    if tier is None:
        raise ValueError("a table with device_rows has a tier")
    before = tier.hits, tier.reads
    found = time_in_turns(
        "tier",
        f"{arguments.batch} x {arguments.length}, {rows:,} x {arguments.dim}, adagrad",
        trainings,
        batch_rows=arguments.batch,
        steps=dict.fromkeys(trainings, 20),
        repeats=arguments.repeats,
    )
    hits, reads = tier.hits - before[0], tier.reads - before[1]
    found[1].details.update(hit_rate=hits / (hits + reads), swapped=reads, needed=hits + reads)
    report.measurements += found
    bars = [Bar(tiered, whole, TIER_SHARE, at_least=False)]
    report.verdicts += judge_wall_time(found, bars)
    return found


def _build_known(dim: int, rows: int, device_rows: int | None = None) -> DynamicTable:
    """Returns a table that knows all keys."""
    keys = KeySpace("item", DynamicTableConfig(capacity=rows, device_rows=device_rows))
    table = DynamicTable("item", keys, dim, seed=1)
    keys.set_keys(np.arange(FIRST_TOKEN_ID, rows))
    return table


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    if "index" in arguments.sections:
        found = measure_index(report, arguments)
        console.print(build_table(f"index: {found[0].shape}, one core", found))
        console.print(
            f"{found[0].rows_per_cpu_s / 1e6:.1f} M keys per CPU-second (aim: "
            f"{LOOKUPS_PER_S / 1e6:g}), {found[0].details['bytes_per_key']:.1f} bytes a key "
            f"(aim: at most {KEY_BYTES:g})"
        )
    if "sweep" in arguments.sections:
        found = measure_sweep(report, arguments)
        console.print(build_table(f"sweep: {found[0].shape}, one core", found))
        spread = {name: round(value, 3) for name, value in found[1].details.items()}
        console.print(
            f"at once {found[0].cpu_s:.2f} CPU-s for {found[0].details['evicted']:,} evicted "
            f"(aim: at most {SWEEP_S:g}); CPU of a spread step with its batch: {spread}"
        )
    if "step" in arguments.sections:
        found = measure_step(report, arguments)
        console.print(build_table(f"step: {found[0].shape}, per step", found))
    if "tier" in arguments.sections:
        found = measure_tier(report, arguments)
        console.print(build_table(f"tier: {found[0].shape}, per step", found))
        console.print(
            f"CPU {found[1].cpu_s / found[0].cpu_s:.2f} x; "
            f"{found[1].details['hit_rate']:.1%} of a step's rows were on the device"
        )
    print_report(report, console, "bars (steps: wall time)")
    return report


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
