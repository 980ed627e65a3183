"""What checks know of a dataset version: statistics, schema, rows, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from conf.artefacts.dataset import DatasetPaths, resolve_version
from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR, ColumnEncoding, EncoderPlan
from conf.encoders.bags import SparseIndices
from conf.encoders.declaration import NUMBERS
from conf.errors import InputDataError, SluiceError
from conf.json_text import parse_json
from conf.manifest import MANIFEST_FILE, FileInfo, Manifest
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSchema, canonical_json
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.vocabulary import load_vocabulary
from etl.quality.drift import Distribution, build_distribution
from etl.quality.figures import Figures, is_vocabulary, read_figures
from etl.tfrecord.codec.crc32c import describe_file

STATISTICS_FILE = "statistics.json"
_SPECIAL = {PAD_ID: "(pad)", OOV_ID: "(oov)"}


def write_statistics(version: Path, statistics: Mapping[str, Mapping[str, Any]]) -> FileInfo:
    file, data = version / STATISTICS_FILE, {"splits": statistics}
    write_text_atomic(file, json.dumps(data, sort_keys=True, allow_nan=False) + "\n")
    return describe_file(version, file)


def read_statistics(version: Path) -> dict[str, dict[str, Any]]:
    """Reads them back; empty for a version that was published without."""
    file = version / STATISTICS_FILE
    if not file.is_file():
        return {}
    try:
        return dict(parse_json(file.read_text(encoding="utf-8"))["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputDataError(f"{file} cannot be read", received=repr(error)) from error


@dataclass(frozen=True)
class VersionView:
    """A dataset version as the checks see it, published or about to be.

    `source_rows` are those that parsed.
    """

    directory: Path
    schema: FeatureSchema
    source_rows: Mapping[str, int]
    split_rows: Mapping[str, int]
    figures: Figures = field(default_factory=dict)

    @cached_property
    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        return read_statistics(self.directory)

    @cached_property
    def _plan(self) -> EncoderPlan:
        return read_plan_file(self.directory / ENCODERS_DIR)

    def feature(self, split: str, name: str) -> Mapping[str, Any] | None:
        """Unabridged statistics of a feature, or None where there are none."""
        return self.statistics.get(split, {}).get(name)

    def is_vocabulary(self, name: str) -> bool:
        return is_vocabulary(self.schema[name])

    def tokens(self, name: str, ids: Sequence[int]) -> dict[int, str] | None:
        """Returns the tokens of some ids of a feature, or None where it has no vocabulary."""
        if not self.is_vocabulary(name):
            return None
        spec = self._plan.vocabulary(self.schema[name].encoding)
        table = load_vocabulary(self.directory / ENCODERS_DIR, spec)
        first = spec.first_token_id
        known = [i for i in ids if first <= i < first + len(table)]
        found = table["token"].take([i - first for i in known]).to_pylist()
        buckets = {i: f"(oov {i - FIRST_TOKEN_ID})" for i in ids if FIRST_TOKEN_ID <= i < first}
        return {**_SPECIAL, **buckets, **dict(zip(known, map(str, found), strict=True))}

    def distribution(self, split: str, name: str) -> Distribution | None:
        """Returns the distribution of a feature as it stands in the records, if there is one."""
        feature = self.feature(split, name)
        if feature is None or not feature.get("values"):
            return None
        plain = build_distribution(feature)
        if not self.is_vocabulary(name):
            return plain
        return build_distribution(feature, self.tokens(name, [int(v) for v in plain.counts]))

    def comparable(self, split: str, name: str) -> dict[str, Distribution]:
        """Returns a feature's distributions by what their values are; alike ones are compared."""
        plain = self.distribution(split, name)
        if plain is None:
            return {}
        if self.is_vocabulary(name):
            return {"tokens": plain}
        column = next(column for column in self._plan.columns if column.feature == name)
        operation, feature = column.operation, self.statistics[split][name]
        if operation is None:
            return {RAW_VALUES: plain}
        if isinstance(operation, SparseIndices):
            names = _name_indices([int(value) for value in plain.counts], column, operation)
            return {"indices": build_distribution(feature, names)}
        found, raw = {self._describe_encoder(column): plain}, feature.get("raw", {})
        if operation.raw_values != "compared" or "values" not in raw:
            return found
        are_numbers, nulls = set(operation.accepts) <= set(NUMBERS), raw["null_values"]
        compared = build_distribution(raw["values"], are_numbers=are_numbers, nulls=nulls)
        return {RAW_VALUES: compared, **found}

    def _describe_encoder(self, column: ColumnEncoding) -> str:
        """All that decides which value an encoder makes of which."""
        plan, operation = self._plan, column.operation
        used = {getattr(operation, "vocabulary", None), getattr(operation, "table", None)}
        fitted = [(own.name, own.file_crc32c) for own in plan.vocabularies if own.name in used]
        fitted += [(own.name, own.file_crc32c) for own in plan.tables if own.name in used]
        shown = None if operation is None else operation.to_json()
        inputs = [raw.name for raw in column.inputs]
        return canonical_json({"operation": shown, "columns": inputs, "fitted": fitted})


RAW_VALUES = "raw values"


def _name_indices(
    ids: Sequence[int], column: ColumnEncoding, operation: SparseIndices
) -> dict[int, str]:
    """Names ids of merged index spaces by column and index: a space that grows moves the others."""
    names, first = dict(_SPECIAL), FIRST_TOKEN_ID
    for raw, size in zip(column.inputs, operation.sizes, strict=True):
        names |= {i: f"{raw.name}:{i - first}" for i in ids if first <= i < first + size}
        first += size
    return names


class ComparedFeature(NamedTuple):
    """One feature in two versions, and why the two cannot be compared although there are values."""

    before: Distribution | None = None
    after: Distribution | None = None
    gap: str | None = None


def compare_feature(
    before: VersionView | None, after: VersionView, split: str, name: str
) -> ComparedFeature:
    """Finds distributions of a feature that do not depend on what either build has fitted."""
    if before is None:
        return ComparedFeature()
    first, second = before.comparable(split, name), after.comparable(split, name)
    for kind in second:
        if kind in first:
            return ComparedFeature(first[kind], second[kind])
    gap = f"it is encoded in another way than in version {before.directory.name}"
    if (RAW_VALUES in first) != (RAW_VALUES in second):
        gap += ", and one of both keeps no raw values of it"
    one, other = (next(iter(side.values()), None) for side in (first, second))
    return ComparedFeature(one, other, gap if first and second else None)


def view_version(version: Path, manifest: Manifest) -> VersionView:
    counts = manifest.counts
    bad = {name: sum(reasons.values()) for name, reasons in counts.quarantined.items()}
    return VersionView(
        version,
        manifest.schema,
        {name: rows - bad.get(name, 0) for name, rows in counts.read.items()},
        {split.name: split.rows for split in manifest.splits},
        read_figures(manifest),
    )


def view_current(paths: DatasetPaths) -> VersionView | None:
    """Returns the view of a dataset's current version, or None where there is none to read.

    A damaged version must not keep a sound one from being published.
    """
    if not paths.current.is_file():
        return None
    try:
        version = resolve_version(paths.base)
        text = (version / MANIFEST_FILE).read_text(encoding="utf-8")
        view = view_version(version, Manifest.loads(text))
        _ = view.statistics
        return view
    except (SluiceError, OSError, UnicodeDecodeError):
        return None
