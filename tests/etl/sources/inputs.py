"""Sources written and read in a line, for the tests of their readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.etl.sources import SourceConfig
from etl.sources.read import read_source
from etl.sources.source import ORDER_COLUMN, Source

INT = {"name": "id", "type": "int64"}


def declare(*columns: dict[str, Any], **options: Any) -> SourceConfig:
    """A source config; `path` is `in` where nothing else is said."""
    place = {} if {"table", "jdbc"} & options.keys() else {"path": "in"}
    given = {"columns": list(columns)} if columns else {}
    return SourceConfig.model_validate({**place, **given, **options})


def read(spark: Any, folder: Path, config: SourceConfig, dates: Any = None) -> Source:
    return read_source(spark, "log", config, str(folder), dates)


def write_lines(folder: Path, lines: Sequence[str], name: str = "in") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def parse(
    spark: Any, folder: Path, lines: Sequence[str], *columns: dict[str, Any], **options: Any
) -> list[Any]:
    """What becomes of each line."""
    write_lines(folder, lines)
    return outcomes(read(spark, folder, declare(*columns, **options)))


def good(source: Source) -> list[tuple[Any, ...]]:
    """Values of the good rows, in the order of the input."""
    rows = source.good.orderBy(ORDER_COLUMN).drop(ORDER_COLUMN).collect()
    return [tuple(row) for row in rows]


def reasons(source: Source) -> list[str]:
    """Reasons of the bad rows, in the order of the input."""
    bad = source.rows.where("__reason is not null").orderBy(ORDER_COLUMN)
    return [row["__reason"] for row in bad.select("__reason", ORDER_COLUMN).collect()]


def outcomes(source: Source) -> list[Any]:
    """Of every row, in the order of the input: its values as a tuple, or its reason."""
    rows = source.rows.orderBy(ORDER_COLUMN).collect()
    names = [name for name in source.good.columns if name != ORDER_COLUMN]
    return [row["__reason"] or tuple(row[name] for name in names) for row in rows]
