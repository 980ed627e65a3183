"""`python -m tests.bench.tfrecord`: all figures of the wire in one run.

Figures depend on the machine; ratios are what carries over. Peers that are not on the machine are
left out, and the end of the output says how to get them.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from etl.records.jvm_connector import CONNECTOR_PACKAGE
from tests.bench.clock import pin_to_one_core
from tests.bench.measurements import (
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
from tests.bench.shapes import SHAPES
from tests.bench.tfrecord.codec import (
    CODEC_BARS,
    CRC,
    ENCODE,
    ENCODE_GOAL_MB_PER_S,
    MEMCPY,
    limit_tensorflow_threads,
    measure_codec,
)
from tests.bench.tfrecord.peers import (
    CONNECTOR_JAR_VARIABLE,
    TFX_PYTHON_VARIABLE,
    PeerMissingError,
    find_connector,
    find_tfx_bsl,
)
from tests.bench.tfrecord.spark_io import (
    READ_BARS,
    SparkSettings,
    build_scale_table,
    measure_scale,
    measure_spark,
    spark_bars,
)

_DEFAULT_SHAPES = ("ctr", "history", "history2", "strings", "vectors")
_SOURCES = ("parquet", "cached")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("tfrecord", __doc__)
    add = parser.add_argument
    add("--sections", nargs="+", choices=("codec", "spark"), default=["codec", "spark"],
        help="what to measure, besides --scale")  # fmt: skip
    add("--only-scale", action="store_true", help="measure nothing but --scale")
    add("--shapes", nargs="+", choices=tuple(SHAPES), default=list(_DEFAULT_SHAPES))
    add("--rows", type=int, default=10_000, help="codec: rows per batch")
    add("--repeats", type=int, default=10, help="codec: timed rounds per figure")
    add("--spark-rows", type=int, default=1_000_000, help="Spark: rows of the table")
    add("--spark-repeats", type=int, default=3, help="Spark: timed runs per figure")
    add("--sources", nargs="+", choices=_SOURCES, default=list(_SOURCES),
        help="Spark: where the rows come from")  # fmt: skip
    add("--scale", type=int, nargs="+", default=[], metavar="ROWS", help="sizes, e.g. 1000000")
    add("--scale-shape", choices=tuple(SHAPES), default="narrow")
    add("--master", default="local[2]", help="Spark's master")
    add("--driver-memory", default="2g")
    add("--conf", action="append", default=[], metavar="KEY=VALUE", help="further Spark setting")
    add("--tfx-python", help=f"Python with tfx_bsl; else ${TFX_PYTHON_VARIABLE}")
    add("--connector", default=CONNECTOR_PACKAGE, help="Maven coordinates of the JVM connector")
    add("--connector-jar", help=f"its jar instead; else ${CONNECTOR_JAR_VARIABLE}")
    add("--ivy", help="folder for what Spark resolves from Maven")
    add("--work-dir", type=Path, help="folder for tables and shards; a temporary one if not given")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("rows", "repeats", "spark_rows", "spark_repeats"))
    if any(rows < 1 for rows in arguments.scale):
        parser.error("--scale takes numbers of rows, 1 or more")
    if any("=" not in setting for setting in arguments.conf):
        parser.error("--conf takes KEY=VALUE")
    if arguments.only_scale and not arguments.scale:
        parser.error("--only-scale needs --scale")


def run_codec(arguments: argparse.Namespace, report: BenchReport, console: Console) -> None:
    """Measures the codec on one core."""
    tfx = None
    try:
        tfx = find_tfx_bsl(arguments.tfx_python)
    except PeerMissingError as error:
        report.skip(str(error))
    with pin_to_one_core():
        limit_tensorflow_threads()
        for name in arguments.shapes:
            shape = SHAPES[name]
            try:
                found = list(measure_codec(shape, arguments.rows, arguments.repeats, tfx))
            except PeerMissingError as error:
                report.skip(str(error))
                found = list(measure_codec(shape, arguments.rows, arguments.repeats, None))
            report.measurements += found
            report.verdicts += judge(name, found, CODEC_BARS)
            console.print(build_table(f"codec, one core: {shape.title}", found))
            console.print(describe_encode(found))


def describe_encode(found: list[Measurement]) -> str:
    """One line: the encoder's speed against its goal and its limits."""
    by_name = {m.name: m for m in found}
    encode, copy, crc = (by_name[name] for name in (ENCODE, MEMCPY, CRC))
    limit = encode.bytes and encode.bytes / (copy.wall_s + crc.wall_s) / 1e6
    return (
        f"encode: {encode.mb_per_s:,.0f} MB/s of finished TFRecord (goal {ENCODE_GOAL_MB_PER_S}, "
        f"on the CTR shape); memcpy and CRC-32C alone: {limit:,.0f} MB/s\n"
    )


def run_spark(
    arguments: argparse.Namespace, settings: SparkSettings, report: BenchReport, console: Console
) -> None:
    """Measures Spark end to end."""
    for name in arguments.shapes:
        shape, found = SHAPES[name], list[Measurement]()
        for measured in measure_spark(shape, settings, report.skip, tuple(arguments.sources)):
            console.print(f"{name}: {measured.name}: {measured.cpu_s:.1f} CPU s", style="dim")
            found.append(measured)
        report.measurements += found
        for source in arguments.sources:
            report.verdicts += judge(name, found, spark_bars(shape, source))
        report.verdicts += judge(name, found, READ_BARS)
        title = f"Spark, {settings.master}, {settings.rows:,} rows: {shape.title}"
        console.print(build_table(title, found))


def run_scale(
    arguments: argparse.Namespace, settings: SparkSettings, report: BenchReport, console: Console
) -> None:
    """Measures growing tables."""
    found = list(measure_scale(arguments.scale_shape, arguments.scale, settings, report.skip))
    report.measurements += found
    if found:
        console.print(build_scale_table(found))


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it.

    Args:
        arguments: As `build_parser` parses them.
        console: Where to print.

    Returns:
        All figures.
    """
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    sections = [] if arguments.only_scale else arguments.sections
    if "codec" in sections:
        run_codec(arguments, report, console)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        work_dir = arguments.work_dir or Path(folder)
        work_dir.mkdir(parents=True, exist_ok=True)
        spark = SparkSettings(
            work_dir.resolve(), arguments.spark_rows, arguments.spark_repeats, arguments.master,
            arguments.driver_memory, tuple(tuple(s.split("=", 1)) for s in arguments.conf),
        )  # fmt: skip
        if "spark" in sections:
            run_spark(arguments, _add_connector(spark, arguments, report), report, console)
        if arguments.scale:
            run_scale(arguments, spark, report, console)
    print_report(report, console)
    return report


def _add_connector(
    settings: SparkSettings, arguments: argparse.Namespace, report: BenchReport
) -> SparkSettings:
    try:
        connector = find_connector(arguments.connector_jar, arguments.connector, arguments.ivy)
    except PeerMissingError as error:
        report.skip(str(error))
        return settings
    return replace(settings, connector=connector)


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
