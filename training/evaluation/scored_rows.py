"""The table that every metric is computed from: system, score or rank, label and weight of rows.

A block holds rows of one batch and one system. Sums over its metrics are kept by group: of users,
for intervals, and of slices, such as items by how often train has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.artefacts.train_counts import KeyPart
from conf.dates import Part
from conf.encoders.dates import DatePart
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSpec
from conf.training.input import InputConfig
from training.encoders.vocabularies import (
    find_named_ids,
    is_named,
    read_key_vocabulary,
    read_plan,
    read_token_counts,
)
from training.evaluation.intervals import (
    GROUPS,
    Interval,
    compare_groups,
    describe_differences,
    find_means,
)
from training.evaluation.metrics import FloatArray, IntArray, Per
from training.input.batches import Features
from training.input.train_counts import read_train_counts
from training.reader.filters import hash_keys

_COLUMNS = ("scores", "is_counted", "labels", "weights", "users", "groups")


@dataclass(frozen=True)
class ScoredRows:
    """Rows of one system: `[rows]` each."""

    scores: NDArray[Any]
    is_counted: NDArray[np.bool_]  # has a label, and a weight above 0
    labels: FloatArray  # NaN where there is none
    weights: FloatArray | None  # None: 1 each
    users: IntArray  # ids; 0 where there are none
    groups: IntArray  # of users
    slices: tuple[IntArray, ...] = ()  # of each slicing, the slice that a row is in

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, rows: NDArray[Any]) -> ScoredRows:
        columns = [getattr(self, name) for name in _COLUMNS]
        taken: Any = [None if column is None else column[rows] for column in columns]
        return replace(ScoredRows(*taken), slices=tuple(each[rows] for each in self.slices))

    @classmethod
    def join(cls, parts: Sequence[ScoredRows]) -> ScoredRows:
        """Rows of several batches, without slices."""
        columns = [[getattr(part, name) for part in parts] for name in _COLUMNS]
        joined: Any = [None if each[0] is None else np.concatenate(each) for each in columns]
        return cls(*joined)

    def take_counted(self) -> ScoredRows:
        """The rows that metrics of labels count."""
        return self if self.is_counted.all() else self.take(np.flatnonzero(self.is_counted))


@dataclass(frozen=True)
class UserGroups:
    """Puts rows into groups of users, so that all rows of a user are in one.

    Up to `GROUPS` users are a group each, more of them share groups by hash: drawing these groups
    is drawing clusters too, only larger ones. Unknown users who share an id (no `ids` of one user)
    are one group, from `GROUPS` on. Without a feature each row is a user.
    """

    feature: str | None = None
    ids: range | None = None

    def find(self, features: Features, rows: IntArray) -> IntArray:
        """The group of each row of a batch; `rows` are the numbers of its rows."""
        if self.feature is None:
            return rows % GROUPS
        ids = np.asarray(features[self.feature], np.int64)
        groups = ids
        if self.ids is None or self.ids.stop > GROUPS:
            groups = (hash_keys(ids) % np.uint64(GROUPS)).astype(np.int64)
        return np.where(self.are_named(ids), groups, GROUPS + groups)

    def are_named(self, ids: IntArray) -> NDArray[np.bool_]:
        return is_named(ids, self.ids)


def build_user_groups(version_dir: ReadablePath, manifest: Manifest) -> UserGroups:
    user = manifest.keys.user
    if user is None or manifest.schema[user].shape != () or manifest.schema[user].dtype != "int64":
        return UserGroups()
    return UserGroups(user, find_named_ids(version_dir, manifest, user))


def number_owners(version_dir: ReadablePath, manifest: Manifest, users: IntArray) -> IntArray:
    """Numbers the owner of each row: known users from 0, below 0 ids that unknown ones share."""
    groups = build_user_groups(version_dir, manifest)
    if groups.feature is None:
        return -1 - np.arange(len(users))
    numbers = np.unique(users, return_inverse=True)[1]
    return np.where(groups.are_named(users), numbers, -1 - numbers)


def count_owners(owners: IntArray) -> int:
    """How many known users there are."""
    return len(np.unique(owners[owners >= 0]))


def has_user_vocabulary(manifest: Manifest) -> bool:
    """Whether rows name their user by an id of a vocabulary."""
    user = manifest.keys.user
    spec = None if user is None else manifest.schema[user]
    return spec is not None and _has_groups(spec)


@dataclass
class RowColumns:
    """Which features are columns; `may_lack`: a NaN in place of the label is no label."""

    groups: UserGroups = field(default_factory=UserGroups)
    slicings: Sequence[Slicing] = ()
    label: str | None = None
    weight: str | None = None
    may_lack: bool = False
    _rows: int = 0

    def with_label(self, manifest: Manifest, label: str) -> RowColumns:
        may_lack = manifest.may_lack(manifest.schema[label])
        return replace(self, label=label, weight=manifest.find_weight(), may_lack=may_lack)

    @property
    def inputs(self) -> tuple[str, ...]:
        names = (self.label, self.weight, self.groups.feature)
        slices = (slicing.feature for slicing in self.slicings)
        return tuple(dict.fromkeys(name for name in (*names, *slices) if name is not None))

    def describe_weight(self) -> dict[str, str]:
        return {} if self.weight is None else {"weighted_by": self.weight}

    def read(self, features: Features, scores: NDArray[Any]) -> ScoredRows:
        """The rows of a batch, in its order."""
        size, users = len(scores), self.groups.feature
        numbers = np.arange(self._rows, self._rows + size)
        self._rows += size
        weights = read_weights(features, self.weight, size)
        is_counted = np.ones(size, bool) if weights is None else weights > 0.0
        labels = np.full(size, np.nan)
        if self.label is not None:
            value = features[self.label]
            labels = _read_label(value)
            if self.may_lack or isinstance(value, tf.RaggedTensor):
                is_counted &= ~np.isnan(labels)
        return ScoredRows(
            scores,
            is_counted,
            labels,
            weights,
            np.zeros(size, np.int64) if users is None else np.asarray(features[users], np.int64),
            self.groups.find(features, numbers),
            tuple(slicing.find_slices(features) for slicing in self.slicings),
        )


def _read_label(value: Any) -> FloatArray:
    if isinstance(value, tf.RaggedTensor):  # Records may lack it.
        value = tf.cast(value, tf.float64).to_tensor(np.nan, shape=[None, 1])[:, 0]
    return np.asarray(value, np.float64)


def read_weights(features: Features, weight: str | None, rows: int) -> FloatArray | None:
    """Weights of rows, `[rows]` float64, each finite and 0 or more; None: there are none."""
    if weight is None:
        return None
    weights = np.asarray(features[weight], np.float64).reshape(rows)  # A scalar, or a list of one.
    bad = ~(np.isfinite(weights) & (weights >= 0.0))
    if bad.any():
        raise InputDataError(
            f"weight {weight!r} of a row is none",
            received=str(weights[int(bad.argmax())]),
            allowed="finite numbers, 0 or more",
            fix="correct the weight in the build",
        )
    return weights


def find_labelled(manifest: Manifest, label: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    if manifest.may_lack(manifest.schema[label]):
        return ~np.isnan(values)
    return np.ones(len(values), bool)


class DistinctRows:
    """Distinct rows of columns of ids, in memory that grows with these alone."""

    def __init__(self, columns: int = 1) -> None:
        self._parts: list[tuple[IntArray, ...]] = [(np.zeros(0, np.int64),) * columns]
        self._new = 0

    def add(self, *columns: IntArray) -> None:
        self._parts.append(columns)
        self._new += len(columns[0])
        if self._new > len(self._parts[0][0]):  # As many new ones as distinct ones.
            self._parts, self._new = [self.read()], 0

    def read(self) -> tuple[IntArray, ...]:
        """`[distinct]` of each column, sorted by the first one, then the next."""
        columns = [np.concatenate(each) for each in zip(*self._parts, strict=True)]
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
        new = np.ones(len(order), bool)
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        return tuple(column[new] for column in columns)


ROWS = "rows"
"""Column of sums that counts the rows of a group, each by its weight."""


class GroupSums:
    """Sums of columns over the rows of each group, in memory that does not grow with the rows."""

    def __init__(self, groups: int = 1) -> None:
        self.names: tuple[str, ...] = ()
        self._sums = np.zeros((groups, 0))

    def add(
        self,
        values: Mapping[str, NDArray[Any]],
        groups: IntArray | None = None,
        weights: FloatArray | None = None,
    ) -> None:
        """Adds rows: `[rows]` by name (the same ones each time), group and weight of each."""
        if not self.names:
            self.names = (*values, ROWS)
            self._sums = np.zeros((len(self._sums), len(self.names)))
        columns = [values[name] for name in self.names[:-1]]
        rows = np.stack([*columns, np.ones(len(columns[0]))], axis=1)
        rows = rows if weights is None else rows * weights[:, np.newaxis]
        if groups is None:
            self._sums[0] += rows.sum(axis=0)
        else:
            np.add.at(self._sums, groups, rows)

    def __getitem__(self, name: str) -> FloatArray:
        """The sums of a column, `[groups]`."""
        return self._sums[:, self.names.index(name)] if self.names else self._sums.sum(axis=1)

    def total(self, name: str = ROWS) -> float:
        return float(self[name].sum())

    def means(self) -> dict[str, float]:
        """The mean of each column over all rows; at least one row."""
        return {name: self.total(name) / self.total() for name in sorted(self.names[:-1])}


SLICED_SYSTEMS = ("model", "popularity")


class SystemSums:
    """Metrics of several systems on the same rows: means, differences, slices."""

    def __init__(self, slicings: Sequence[Slicing] = ()) -> None:
        self._slicings = slicings
        self._systems: dict[str, GroupSums] = {}
        self._slices: dict[tuple[str, str], GroupSums] = {}

    def add(self, system: str, rows: ScoredRows, values: Mapping[str, FloatArray]) -> None:
        """Adds a system's metrics of rows, `[rows]` by name; all systems get the same rows."""
        self._systems.setdefault(system, GroupSums(2 * GROUPS)).add(values, rows.groups)
        if system in SLICED_SYSTEMS:
            for slicing, groups in zip(self._slicings, rows.slices, strict=False):
                sums = GroupSums(len(slicing.labels))
                self._slices.setdefault((slicing.name, system), sums).add(values, groups)

    @property
    def rows(self) -> int:
        return int(next(iter(self._systems.values())).total()) if self._systems else 0

    def means(self) -> dict[str, dict[str, float]]:
        return {system: sums.means() for system, sums in self._systems.items()}

    def compare(self, system: str, seed: int) -> dict[str, Any]:
        own = self._systems[system]
        metrics, others = own.names[:-1], [name for name in self._systems if name != system]
        pairs = [(other, metric) for other in others for metric in metrics]
        gaps = [own[metric] - self._systems[other][metric] for other, metric in pairs]
        found = compare_groups(np.stack([*gaps, own[ROWS]], axis=1), find_means, seed)
        against: dict[str, dict[str, Interval]] = {other: {} for other in others}
        for (other, metric), interval in zip(pairs, found, strict=True):
            against[other][metric] = interval
        return describe_differences(own[ROWS], against)

    def describe_slices(self) -> dict[str, list[dict[str, Any]]]:
        """The slices of each slicing that have rows: value, rows, means by system."""
        return {
            slicing.name: [
                self._describe_slice(slicing, group, int(rows))
                for group, rows in enumerate(self._slices[slicing.name, SLICED_SYSTEMS[0]][ROWS])
                if rows
            ]
            for slicing in self._slicings
        }

    def _describe_slice(self, slicing: Slicing, group: int, rows: int) -> dict[str, Any]:
        means = {}
        for system in SLICED_SYSTEMS:
            sums = self._slices[slicing.name, system]
            means[system] = {m: float(sums[m][group] / rows) for m in sums.names[:-1]}
        return {"value": slicing.labels[group], ROWS: rows, "systems": means}


USER_FREQUENCY, ITEM_FREQUENCY = "user_frequency", "item_frequency"
BAND_STARTS = (0, 1, 10, 100, 1000)
BANDS = ("0", "1-9", "10-99", "100-999", "1000+")
MOST_VALUES, MOST_BUCKETS = 20, 64
UNKNOWN, OTHERS = "(unknown)", "(others)"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True)
class Slicing:
    """How rows are cut: by `feature`, one id, into `slices` `[ids]` that `labels` call."""

    name: str
    feature: str
    labels: tuple[str, ...]
    slices: IntArray

    def find_slices(self, features: Features) -> IntArray:
        ids = np.asarray(features[self.feature], np.int64)
        known = (ids >= 0) & (ids < len(self.slices))
        return self.slices[np.where(known, ids, OOV_ID)]


def plan_slicings(
    version_dir: ReadablePath,
    manifest: Manifest,
    names: Sequence[str] | None,
    per: Per,
    config: InputConfig | None = None,
) -> tuple[Slicing, ...]:
    """Plans `evaluation.slices`; None: both frequencies, as far as train counts them."""
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
            _require_groups(manifest, name, per, [n for n, key in keys.items() if key])
            slicings.append(_cut_by_value(version_dir, manifest, name))
    return tuple(slicings)


def _has_groups(spec: FeatureSpec) -> bool:
    return spec.shape == () and spec.vocabulary_size is not None


def _require_groups(manifest: Manifest, name: str, per: Per, frequencies: list[str]) -> None:
    specs = [spec for spec in manifest.schema.features if _has_groups(spec)]
    known = [spec.name for spec in specs if per == "event" or spec.role == "user"]
    if name not in known:
        allowed = [*frequencies, *known]
        raise ConfigError(
            f"evaluation.slices: {name} gives no slices of rows that are {per}s",
            received=name,
            allowed=", ".join(allowed),
            fix=did_you_mean(name, allowed)
            if per == "event"
            else "set evaluation.per=event, whose rows have one item each, or leave it out",
        )


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


def _cut_by_value(version_dir: ReadablePath, manifest: Manifest, name: str) -> Slicing:
    size = int(manifest.schema[name].vocabulary_size or 0)
    vocabulary = read_key_vocabulary(version_dir, manifest, name)
    if manifest.schema[name].encoding.startswith(f"{DatePart.kind}:"):
        operation = read_plan(version_dir, manifest).column(name).operation
        if isinstance(operation, DatePart):
            return _cut_by_part(name, operation.part, size)
    first = 0 if vocabulary is None else vocabulary.first_id
    most = MOST_BUCKETS if vocabulary is None else MOST_VALUES
    shown = np.arange(first, min(first + most, size))
    if vocabulary is not None:  # Ids of a token file, or of a grown one, do not fall with it.
        counts = read_token_counts(version_dir, manifest, name)
        shown = first + np.argsort(-counts, kind="stable")[:most]
    names = shown.tolist() if vocabulary is None else vocabulary.take(shown).to_pylist()
    slices = np.full(size, len(shown), np.int64)
    slices[shown] = np.arange(len(shown))
    slices[:first] = len(shown) + 1
    return Slicing(name, name, (*map(str, names), OTHERS, UNKNOWN), slices)


def _cut_by_part(name: str, part: Part, size: int) -> Slicing:
    values = np.arange(size - FIRST_TOKEN_ID)
    if part in ("day", "day_of_year", "month"):
        names = tuple(map(str, values + 1))
    else:
        names = WEEKDAYS if part == "weekday" else tuple(map(str, values))
    slices = np.concatenate((np.full(FIRST_TOKEN_ID, len(values)), values)).astype(np.int64)
    return Slicing(name, name, (*names, UNKNOWN), slices)
