"""What a build will read and write, estimated from the config and a look at the input files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.etl.sources import is_list_type
from conf.manifest import InputFile
from etl.events.splits import TRAIN, record_splits
from etl.feature_plan import SEEN, FeaturePlan, raw_value_columns

_SAMPLE_BYTES = 1 << 16
_SAMPLE_FILES = 8
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
        rows: Rows by source.
        records: Records of train, validation and test together, at most.
        output_bytes: Their bytes, uncompressed.
        shards: Shards of the train split.
    """

    input_bytes: int
    rows: Mapping[str, int]
    records: int
    output_bytes: int
    shards: int

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "input_bytes": self.input_bytes,
            "rows": dict(self.rows),
            "records": self.records,
            "output_bytes": self.output_bytes,
            "train_shards": self.shards,
        }


def estimate_sizes(
    config: BuildConfig, plan: FeaturePlan, inputs: Sequence[InputFile]
) -> SizeEstimate:
    """Estimates what a build reads and writes, from the first bytes of some input files.

    Args:
        config: The build's config.
        plan: Its features.
        inputs: Its input files; files without lines count as no rows.
    """
    by_source: dict[str, list[InputFile]] = {}
    for file in inputs:
        by_source.setdefault(file.source, []).append(file)
    rows = {name: estimate_rows(files) for name, files in by_source.items()}
    records = rows.get(config.events.source, 0) + rows.get(config.split.test_source or "", 0)
    output_bytes = records * estimate_record_bytes(config, plan)
    shards = _estimate_shards(config, records, output_bytes)
    return SizeEstimate(sum(file.bytes for file in inputs), rows, records, output_bytes, shards)


def _estimate_shards(config: BuildConfig, records: int, output_bytes: int) -> int:
    output = config.output
    if output.shard_rows is not None:
        return max(1, math.ceil(records / output.shard_rows))
    if output.shard_bytes is not None:
        return max(1, math.ceil(output_bytes / output.shard_bytes))
    return output.shards


def estimate_rows(files: Iterable[InputFile]) -> int:
    """Estimates the lines of a source by the mean length of lines at the start of some files."""
    files = [file for file in files if file.bytes]
    lines = sampled = 0
    for file in files[:: max(1, len(files) // _SAMPLE_FILES)][:_SAMPLE_FILES]:
        with Path(file.path).open("rb") as handle:
            head = handle.read(_SAMPLE_BYTES)
        end = len(head) if len(head) == file.bytes else head.rfind(b"\n") + 1
        lines += head[:end].count(b"\n") + (end > 0 and head[end - 1 : end] != b"\n")
        sampled += end
    return round(sum(file.bytes for file in files) * lines / sampled) if sampled else 0


def estimate_record_bytes(config: BuildConfig, plan: FeaturePlan) -> int:
    """Estimates the bytes of a train record, uncompressed."""
    held_out = {SEEN, *raw_value_columns(config).values()}
    features = [feature for feature in plan.features if feature.column not in held_out]
    return _RECORD_BYTES + sum(
        _feature_bytes(plan, feature, config.output.layout) for feature in features
    )


def _feature_bytes(plan: FeaturePlan, feature: FeatureConfig, layout: str) -> int:
    kind = plan.column_types[feature.column]
    scalar = kind.removeprefix("list<").removesuffix(">")
    value = _ID_BYTES if feature.vocabulary else _VALUE_BYTES.get(scalar, 8)
    count = 1
    if layout == "packed" and not is_list_type(kind):
        return value
    if is_list_type(kind):
        longest = feature.max_len
        count = _TYPICAL_LIST if longest is None else max(1, round(longest * _FILL))
    return len(feature.name) + _FEATURE_BYTES + value * count


def declared_shards(config: BuildConfig, estimate: SizeEstimate) -> dict[str, int]:
    """Shards by split, as far as they are known before the data is read."""
    return {
        split: estimate.shards if split == TRAIN else config.output.eval_shards
        for split in record_splits(config)
    }
