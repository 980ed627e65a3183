"""What checks know of a dataset version: statistics, schema, rows, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.atomic_output import write_text_atomic
from conf.encoders import ENCODERS_DIR, EncoderPlan
from conf.errors import InputDataError, SluiceError
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import DatasetPaths, resolve_version
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSchema
from etl.encoders.pipeline import read_plan
from etl.encoders.vocabulary import first_token_id, load_vocabulary
from etl.quality.drift import Distribution, build_distribution

STATISTICS_FILE = "statistics.json"
_FORMAT_VERSION = 1
_SPECIAL = {PAD_ID: "(pad)", OOV_ID: "(oov)"}


def write_statistics(version: Path, statistics: Mapping[str, Mapping[str, Any]]) -> Path:
    """Writes the unabridged statistics beside the manifest.

    Args:
        version: Directory of the version.
        statistics: By split and feature, as `merge_statistics` returns them.

    Returns:
        The file.
    """
    data = {"format_version": _FORMAT_VERSION, "splits": statistics}
    file = version / STATISTICS_FILE
    write_text_atomic(file, json.dumps(data, sort_keys=True, allow_nan=False) + "\n")
    return file


def read_statistics(version: Path) -> dict[str, dict[str, Any]]:
    """Reads them back; empty for a version that was published without.

    Raises:
        InputDataError: The file is damaged or of another format version.
    """
    file = version / STATISTICS_FILE
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format_version"] != _FORMAT_VERSION:
            raise InputDataError(
                f"{file} has another format version",
                received=data["format_version"],
                allowed=_FORMAT_VERSION,
            )
        return dict(data["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputDataError(f"{file} cannot be read", received=repr(error)) from error


@dataclass(frozen=True)
class VersionView:
    """A dataset version as the checks see it, published or about to be.

    Attributes:
        directory: Where its files lie.
        schema: Its features.
        source_rows: Rows that parsed, by source.
        split_rows: Records by split.
        label: The label's feature, or None.
    """

    directory: Path
    schema: FeatureSchema
    source_rows: Mapping[str, int]
    split_rows: Mapping[str, int]
    label: str | None = None

    @cached_property
    def statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Unabridged statistics by split and feature."""
        return read_statistics(self.directory)

    @cached_property
    def _plan(self) -> EncoderPlan:
        return read_plan(self.directory / ENCODERS_DIR)

    def feature(self, split: str, name: str) -> Mapping[str, Any] | None:
        """Unabridged statistics of a feature, or None where there are none."""
        return self.statistics.get(split, {}).get(name)

    def is_vocabulary(self, name: str) -> bool:
        """Whether a feature holds ids of a vocabulary."""
        if name not in self.schema:
            return False
        encoding = self.schema[name].encoding
        return any(vocabulary.name == encoding for vocabulary in self._plan.vocabularies)

    def tokens(self, name: str, ids: Sequence[int]) -> dict[int, str] | None:
        """Returns the tokens of some ids of a feature, or None where it has no vocabulary."""
        if not self.is_vocabulary(name):
            return None
        spec = self._plan.vocabulary(self.schema[name].encoding)
        table = load_vocabulary(self.directory / ENCODERS_DIR, spec)
        first = first_token_id(table)
        known = [i for i in ids if first <= i < first + len(table)]
        found = table["token"].take([i - first for i in known]).to_pylist()
        buckets = {i: f"(oov {i - FIRST_TOKEN_ID})" for i in ids if FIRST_TOKEN_ID <= i < first}
        return {**_SPECIAL, **buckets, **dict(zip(known, map(str, found), strict=True))}

    def distribution(self, split: str, name: str) -> Distribution | None:
        """Returns a feature's distribution, or None where there are no statistics of it."""
        feature = self.feature(split, name)
        if feature is None or not feature.get("values"):
            return None
        plain = build_distribution(feature)
        if not self.is_vocabulary(name):
            return plain
        return build_distribution(feature, self.tokens(name, [int(v) for v in plain.counts]))


def view_version(version: Path, manifest: Manifest) -> VersionView:
    """Returns the view of a published version."""
    counts = manifest.counts
    bad = {name: sum(reasons.values()) for name, reasons in counts.quarantined.items()}
    return VersionView(
        version,
        manifest.schema,
        {name: rows - bad.get(name, 0) for name, rows in counts.read.items()},
        {split.name: split.rows for split in manifest.splits},
        manifest.keys.label,
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
