"""What a build will read and write, estimated from the config and a look at the input files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.etl.sources import is_list_type
from conf.etl.time_columns import ms_per_unit
from conf.manifest import InputFile
from conf.splits import TRAIN, VALIDATION
from etl.events.sample_filter import find_where_columns
from etl.features.plan import SEEN, FeaturePlan, raw_value_columns
from etl.row_sample import Row, RowSample, sample_source

# A value of each type on the wire: ids below 2^21 take 3 bytes as a varint.
_VALUE_BYTES = {"int64": 3, "float32": 4, "float64": 4, "string": 12}
_ID_BYTES = 3
# Keys, lengths and tags around a feature's values, and around a record.
_FEATURE_BYTES, _RECORD_BYTES = 10, 20
_TYPICAL_LIST = 4
_FILL = 0.5
"""Share of a bounded history's length that is filled on average."""


@dataclass(frozen=True)
class SizeEstimate:
    """Estimated sizes of a build; good to a factor of about two.

    Attributes:
        input_bytes: Of all sources.
        rows: Rows by source; None: nothing tells without reading it.
        records: Records of train, validation and test together; None likewise.
        output_bytes: Their bytes, uncompressed; None likewise.
        shards: Shards of the train split, 1 where nothing tells.
        notes: What the numbers leave out, so that there may be fewer records.
    """

    input_bytes: int
    rows: Mapping[str, int | None]
    records: int | None
    output_bytes: int | None
    shards: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "input_bytes": self.input_bytes,
            "rows": dict(self.rows),
            "records": self.records,
            "output_bytes": self.output_bytes,
            "train_shards": self.shards,
            "notes": list(self.notes),
        }


def estimate_sizes(
    config: BuildConfig,
    plan: FeaturePlan,
    inputs: Sequence[InputFile],
    dates: DateRange | None = None,
) -> SizeEstimate:
    """Estimates what a build reads and writes, from some rows of some input files.

    Args:
        config: The build's config.
        plan: Its features.
        inputs: Its input files.
        dates: The run's days.
    """
    by_source: dict[str, list[InputFile]] = {name: [] for name in config.used_sources}
    for file in inputs:
        by_source[file.source].append(file)
    split, log = config.split, config.events.source
    given = [name for name in (split.test_source, split.validation_source) if name]
    wanted = _find_wanted(config, dates)
    samples = {
        name: sample_source(config.sources[name], files, wanted if name == log else ())
        for name, files in by_source.items()
    }
    rows = {name: sample.count for name, sample in samples.items()}
    kept, notes = _select(config, samples[log], dates)
    shares = [kept, *(rows[name] for name in given)]
    records = None if any(n is None for n in shares) else sum(n or 0 for n in shares)
    if records is not None:
        records = _add_negatives(config, samples[log], records)
    output_bytes = None if records is None else records * estimate_record_bytes(config, plan)
    shards = _estimate_shards(config, records or 0, output_bytes or 0)
    input_bytes = sum(file.bytes for file in inputs)
    return SizeEstimate(input_bytes, rows, records, output_bytes, shards, notes)


def _find_wanted(config: BuildConfig, dates: DateRange | None) -> set[str]:
    """Columns of the log that tell which of its rows become records."""
    log = config.sources[config.events.source]
    wanted = set(find_where_columns(config, config.events.where))
    if config.label is not None and config.label.column is not None:
        wanted.add(config.label.column)
    if dates is not None and config.events.time is not None:
        wanted.add(config.events.time)
    # What a dictionary adds is not there yet.
    return wanted.intersection(log.column_types)


def _select(
    config: BuildConfig, sample: RowSample, dates: DateRange | None
) -> tuple[int | None, tuple[str, ...]]:
    """Returns how many rows of the log become records, and what could not be told."""
    columns = config.sources[config.events.source].column_types.keys()
    notes, shares = [], []
    if dates is not None and config.events.time is not None:
        ms = ms_per_unit(config.events.time_unit)
        bounds = (bound / ms for bound in dates.span_ms)
        shares.append(sample.share_between(config.events.time, *bounds))
        notes += ["events outside the run's days"] if shares[-1] is None else []
    if config.events.where is not None:
        is_here = sample.files and columns >= set(find_where_columns(config, config.events.where))
        shares.append(_try_where(config, sample) if is_here else None)
        notes += ["events that do not meet events.where"] if shares[-1] is None else []
    label = config.label.column if config.label is not None else None
    if label in columns:
        shares.append(sample.share(lambda rows: [row for row in rows if row[label] is not None]))
    if config.train_samples != "all":
        notes.append(f"events inside a sequence (train_samples: {config.train_samples})")
    if config.history is not None and config.history.min_len is not None:
        notes.append("histories shorter than history.min_len")
    if config.negatives is not None and not config.negatives.draws:
        notes.append("exposures that are not kept")
    count = sample.count
    if count is not None:
        count = round(count * math.prod(share for share in shares if share is not None))
    return count, tuple(notes)


def _try_where(config: BuildConfig, sample: RowSample) -> float | None:
    """Returns the share of rows that meet `events.where`; None where Spark alone can tell."""
    from sqlglot import exp
    from sqlglot.errors import SqlglotError
    from sqlglot.executor import execute

    condition = config.events.where or "true"
    query = exp.select("__row").from_("events").where(condition, dialect="spark")

    def keep(rows: Sequence[Row]) -> list[Row]:
        table = [{"__row": number, **row} for number, row in enumerate(rows)]
        result = execute(query, tables={"events": table}, dialect="spark")
        return [rows[number] for (number,) in result.rows]

    try:
        return sample.share(keep)
    except (SqlglotError, TypeError, ValueError, KeyError):
        return None


def _add_negatives(config: BuildConfig, sample: RowSample, records: int) -> int:
    """Takes off what is sampled away of rows of label 0, and adds the negatives that are drawn."""
    negatives, thinned = config.negatives, config.down_sampling
    column = config.label.column if config.label is not None else None

    def find_labelled(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if column not in row or row[column] is not None]

    positive = sample.share(
        lambda rows: [row for row in find_labelled(rows) if _is_positive(config, row)]
    ) / max(1e-9, sample.share(find_labelled))
    if thinned is not None:
        records = round(records * (positive + (1 - positive) * thinned.rate))
    elif negatives is not None and negatives.draws:
        records = round(records * (1 + positive * negatives.per_positive))
    return records


def _is_positive(config: BuildConfig, row: Row) -> bool:
    label = config.label
    if label is None or label.column not in row:
        return True
    value = row[label.column]
    if label.at_least is not None:
        return bool(value >= label.at_least)
    return value in label.values if label.values else value > 0


def _estimate_shards(config: BuildConfig, records: int, output_bytes: int) -> int:
    output = config.output
    if output.shard_rows is not None:
        return max(1, math.ceil(records / output.shard_rows))
    if output.shard_bytes is not None:
        return max(1, math.ceil(output_bytes / output.shard_bytes))
    return output.shards


def estimate_record_bytes(config: BuildConfig, plan: FeaturePlan) -> int:
    """Estimates the bytes of a train record, uncompressed."""
    held_out = {SEEN, *raw_value_columns(config).values()}
    features = [feature for feature in plan.features if feature.column not in held_out]
    return _RECORD_BYTES + sum(_feature_bytes(plan, feature) for feature in features)


def _feature_bytes(plan: FeaturePlan, feature: FeatureConfig) -> int:
    kind = plan.column_types[feature.column]
    scalar = kind.removeprefix("list<").removesuffix(">")
    value = _ID_BYTES if feature.vocabulary else _VALUE_BYTES.get(scalar, 8)
    count = 1
    if is_list_type(kind):
        longest = feature.max_len
        count = _TYPICAL_LIST if longest is None else max(1, round(longest * _FILL))
    return len(feature.name) + _FEATURE_BYTES + value * count


def declared_shards(config: BuildConfig, estimate: SizeEstimate) -> dict[str, int]:
    """Shards by split, as far as they are known before the data is read."""
    return {
        split: estimate.shards if split == TRAIN else config.output.eval_shards
        for split in config.record_splits
        if split != VALIDATION or config.split.has_validation
    }
