"""Rows of a source counted by what is wrong with them, and the budget that they must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl import SourceConfig
from etl.sources.source import NEW_COLUMN, REASON_COLUMN, REPEATED_HEADER, Source


@dataclass(frozen=True)
class SourceCounts:
    """Rows of a source: all, and the bad ones by reason.

    Attributes:
        read: All rows, bad ones included.
        bad: Bad rows by reason.
        values: Good rows that have a value, by nullable column.
        new: Keys of one of the rows that are not declared.
    """

    read: int
    bad: dict[str, int]
    values: Mapping[str, int] = field(default_factory=dict)
    new: tuple[str, ...] = ()

    @property
    def bad_rows(self) -> int:
        """Number of bad rows."""
        return sum(self.bad.values())


def count_rows(source: Source) -> SourceCounts:
    """Scans a source once and counts its rows by what is wrong with them."""
    asked = [F.count(name).alias(name) for name in source.nullable]
    if NEW_COLUMN in source.rows.columns:
        # The greatest of the lists of new keys: one example, whatever their number.
        asked.append(F.max(NEW_COLUMN).alias(NEW_COLUMN))
    rows = source.rows.groupBy(REASON_COLUMN).agg(F.count("*").alias("__n"), *asked).collect()
    counts = {row[REASON_COLUMN]: row["__n"] for row in rows}
    if source.headers:
        repeated = counts.pop(REPEATED_HEADER, 0) - source.headers
        counts |= {REPEATED_HEADER: repeated} if repeated > 0 else {}
    bad = {reason: n for reason, n in sorted(counts.items(), key=str) if reason is not None}
    good = next((row for row in rows if row[REASON_COLUMN] is None), None)
    values = {name: good[name] for name in source.nullable} if good else {}
    new = (good[NEW_COLUMN] if good and NEW_COLUMN in source.rows.columns else None) or ()
    return SourceCounts(sum(counts.values()), bad, values, tuple(new))


def check_bad_rows(source: Source, counts: SourceCounts, config: SourceConfig) -> None:
    """Refuses a source with more bad rows than its budget.

    Raises:
        InputDataError: No row is good, the policy is `fail` and a row is bad, or the share of
            bad rows is above `max_fraction`.
    """
    bad, policy = counts.bad_rows, config.bad_rows
    fraction = bad / counts.read if counts.read else 1.0
    over = fraction > policy.max_fraction
    if not (over or (policy.policy == "fail" and bad) or bad == counts.read):
        return
    by_reason = source.bad.groupBy("reason").agg(
        F.min("line").alias("line"), F.count("*").alias("n")
    )
    examples = by_reason.orderBy(F.desc("n"), "reason").limit(3).collect()
    shown = "; ".join(f"{row['reason']}: {row['line'][:120]!r}" for row in examples)
    reasons = ", ".join(f"{reason} {n}" for reason, n in counts.bad.items())
    budget = 0.0 if policy.policy == "fail" else policy.max_fraction
    raise InputDataError(
        f"source {source.name!r} has {bad:,} bad rows of {counts.read:,} ({fraction:.2%})",
        received=f"{reasons or 'no rows'}\n            {shown}",
        allowed=f"at most {budget:.2%} (sources.{source.name}.bad_rows)",
        fix=f"check the {_how_it_is_read(config)} and columns of the source, mend the input, or "
        "raise the budget",
    )


def _how_it_is_read(config: SourceConfig) -> str:
    if config.format in ("delimited", "csv"):
        return f"separator ({config.field_separator!r}), encoding"
    return f"format ({config.format})"
