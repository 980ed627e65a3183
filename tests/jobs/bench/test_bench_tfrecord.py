"""The benchmark runs, and its ratios are those of its figures."""

import io

from rich.console import Console

from jobs.bench.tfrecord import Measurement, build_table, run


def test_small_run_prints_both_shapes() -> None:
    console = Console(file=io.StringIO(), width=120)
    run(rows=20, repeats=1, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "CTR" in text
    assert "history" in text
    assert text.count("parse_example") == 2


def test_ratio_is_to_the_first_line() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(
        build_table("t", [Measurement("base", 2.0, 100, 10), Measurement("twice", 1.0, 100, 10)])
    )
    assert "200.00%" in console.file.getvalue()  # type: ignore[attr-defined]
