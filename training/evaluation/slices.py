"""Slices of the rows that are evaluated: by train frequency of user or item, or by a feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.artefacts.counted_keys import KeyPart
from conf.dates import Part
from conf.encoders.dates import DatePart
from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSpec
from conf.training.input import InputConfig
from training.encoders.vocabularies import read_key_vocabulary, read_plan
from training.evaluation.metrics import FloatArray, IntArray, Per
from training.input.batches import Features
from training.input.train_counts import read_train_counts

USER_FREQUENCY, ITEM_FREQUENCY = "user_frequency", "item_frequency"
BAND_STARTS = (0, 1, 10, 100, 1000)
"""Least number of train events of each band of frequency."""
BANDS = ("0", "1-9", "10-99", "100-999", "1000+")
MOST_VALUES = 20
"""Values of a feature that have a slice of their own: the most frequent ones of train."""
UNKNOWN, OTHERS = "(unknown)", "(others)"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True)
class Slicing:
    """One way to cut rows into groups.

    Attributes:
        name: As it is asked for.
        feature: Scalar feature whose ids decide.
        labels: Names of the groups.
        groups: `[ids]`, the group of each id.
    """

    name: str
    feature: str
    labels: tuple[str, ...]
    groups: IntArray

    def find_groups(self, features: Features) -> IntArray:
        """Returns the group of each row, `[rows]`."""
        ids = np.asarray(features[self.feature], np.int64)
        known = (ids >= 0) & (ids < len(self.groups))
        return self.groups[np.where(known, ids, OOV_ID)]


def plan_slicings(
    version_dir: ReadablePath,
    manifest: Manifest,
    names: Sequence[str] | None,
    per: Per,
    config: InputConfig | None = None,
) -> tuple[Slicing, ...]:
    """Finds out how rows are cut into slices.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        names: `user_frequency`, `item_frequency` or features; None: both frequencies, as far as
            the dataset counts them.
        per: What a row stands for; a user has no one item.
        config: How the train split is read; None: all rows.

    Raises:
        ConfigError: A name is unknown, or has no groups here.
        InputDataError: A vocabulary or the counts are damaged.
    """
    keys = {USER_FREQUENCY: manifest.keys.user, ITEM_FREQUENCY: manifest.keys.item}
    if per == "user":
        del keys[ITEM_FREQUENCY]
    if names is None:
        names = [name for name, key in keys.items() if key and _has_groups(manifest.schema[key])]
    slicings = []
    for name in dict.fromkeys(names):
        if (key := keys.get(name)) is not None and _has_groups(manifest.schema[key]):
            slicings.append(_cut_by_count(version_dir, manifest, name, config))
        else:
            _require_groups(manifest, name, per, keys)
            slicings.append(_cut_by_value(version_dir, manifest, name))
    return tuple(slicings)


def _cut_by_count(
    version_dir: ReadablePath, manifest: Manifest, name: str, config: InputConfig | None
) -> Slicing:
    part: KeyPart = "user" if name == USER_FREQUENCY else "item"
    key = manifest.require_key(part)
    counts = read_train_counts(version_dir, manifest, part, config)
    vocabulary = read_key_vocabulary(version_dir, manifest, key)
    events = counts.place(counts.events, np.arange(manifest.schema[key].vocabulary_size or 0))
    # Many unknown values share an id: how often each occurs is not known.
    events[: FIRST_TOKEN_ID if vocabulary is None else vocabulary.first_id] = 0
    return Slicing(name, key, BANDS, np.searchsorted(BAND_STARTS, events, side="right") - 1)


def _require_groups(
    manifest: Manifest, name: str, per: Per, keys: Mapping[str, str | None]
) -> None:
    of_rows = [spec.name for spec in manifest.schema.features if _has_groups(spec)]
    known = of_rows
    if per == "user":
        known = [n for n in of_rows if manifest.schema[n].role == "user"]
    if name in known:
        return
    allowed = [*(n for n, key in keys.items() if key), *known]
    is_of_events = per == "user" and name in (ITEM_FREQUENCY, *of_rows)
    advice = "set evaluation.per=event, whose rows have one item each, or leave it out"
    raise ConfigError(
        f"evaluation.slices: {name} gives no slices of "
        + ("users" if per == "user" else "these rows"),
        received=name,
        allowed=", ".join(allowed),
        fix=(advice if is_of_events else did_you_mean(name, allowed))
        or "name a single id of the row; put numbers into buckets in the build",
    )


def _has_groups(spec: FeatureSpec) -> bool:
    return spec.shape == () and spec.vocabulary_size is not None


def _cut_by_value(version_dir: ReadablePath, manifest: Manifest, name: str) -> Slicing:
    """Ids of a vocabulary fall with frequency, so its first ids are the most frequent values.

    Ids of a part of a date are shown as its values; those of buckets and hashes as they are.
    """
    size = int(manifest.schema[name].vocabulary_size or 0)
    vocabulary = read_key_vocabulary(version_dir, manifest, name)
    operation = None
    if manifest.schema[name].encoding.startswith(f"{DatePart.kind}:"):
        operation = read_plan(version_dir, manifest).column(name).operation
    if isinstance(operation, DatePart):
        return _cut_by_part(name, operation.part, size)
    first = 0 if vocabulary is None else vocabulary.first_id
    most = 64 if vocabulary is None else MOST_VALUES
    shown = np.arange(first, min(first + most, size))
    names = shown.tolist() if vocabulary is None else vocabulary.take(shown).to_pylist()
    groups = np.full(size, len(shown), np.int64)
    groups[shown] = np.arange(len(shown))
    groups[:first] = len(shown) + 1
    return Slicing(name, name, (*map(str, names), OTHERS, UNKNOWN), groups)


def _cut_by_part(name: str, part: Part, size: int) -> Slicing:
    values = np.arange(size - FIRST_TOKEN_ID)
    if part in ("day", "day_of_year", "month"):
        names = tuple(map(str, values + 1))
    else:
        names = WEEKDAYS if part == "weekday" else tuple(map(str, values))
    groups = np.concatenate((np.full(FIRST_TOKEN_ID, len(values)), values)).astype(np.int64)
    return Slicing(name, name, (*names, UNKNOWN), groups)


@dataclass
class SliceMeans:
    """Means of metrics by slice, of one system.

    Attributes:
        slicings: How rows are cut.
    """

    slicings: Sequence[Slicing]
    _rows: dict[str, IntArray] = field(default_factory=dict)
    _sums: dict[str, dict[str, FloatArray]] = field(default_factory=dict)

    def update(
        self,
        features: Features,
        values: Mapping[str, FloatArray],
        measured: NDArray[np.bool_] | None = None,
    ) -> None:
        """Adds a batch of rows with their metrics.

        Args:
            features: Of all rows of the batch.
            values: `[measured rows]` by name.
            measured: `[rows]`, which of the batch have metrics; None: all.
        """
        for slicing in self.slicings:
            size, groups = len(slicing.labels), slicing.find_groups(features)
            groups = groups if measured is None else groups[measured]
            rows = self._rows.setdefault(slicing.name, np.zeros(size, np.int64))
            rows += np.bincount(groups, minlength=size)
            sums = self._sums.setdefault(slicing.name, {})
            for metric, per_row in values.items():
                total = sums.setdefault(metric, np.zeros(size))
                total += np.bincount(groups, per_row, size)

    def result(self, slicing: Slicing, group: int) -> dict[str, float]:
        """Returns the means of a group that has rows."""
        rows = self._rows[slicing.name][group]
        return {name: float(s[group] / rows) for name, s in self._sums[slicing.name].items()}

    def count_rows(self, slicing: Slicing) -> IntArray:
        """Returns the rows of each group."""
        return self._rows[slicing.name]


def describe_slices(means: Mapping[str, SliceMeans]) -> dict[str, list[dict[str, Any]]]:
    """Returns the slices of several systems that were given the same rows, those with rows.

    Returns:
        By slicing, a list of groups: `value`, `rows` and the metrics by system.
    """
    first = next(iter(means.values()))
    return {
        slicing.name: [
            {
                "value": slicing.labels[group],
                "rows": int(first.count_rows(slicing)[group]),
                "systems": {name: own.result(slicing, group) for name, own in means.items()},
            }
            for group in np.flatnonzero(first.count_rows(slicing)).tolist()
        ]
        for slicing in first.slicings
    }
