"""Times of the items of a sequence: which list holds them, and how old each item is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list
from conf.schema import FeatureSpec
from conf.training.models import HSTUConfig
from training.input.batches import Features
from training.models.model import find_feature
from training.reader.feature_columns import list_length

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
UNKNOWN_AGE = -1.0


@dataclass(frozen=True)
class ItemTimes:
    """Where the times of a sequence's items stand.

    Attributes:
        name: List of gaps to the row's event (float32), or of times (int64).
        request: Feature with the time of the row's event; None: there is none, or gaps say it.
        seconds: How many a unit of the list has.
        are_gaps: Whether the list holds gaps.
    """

    name: str
    request: str | None
    seconds: float
    are_gaps: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Features of a batch that are read."""
        return (self.name,) if self.request is None else (self.name, self.request)

    @property
    def of_targets(self) -> bool:
        """Whether ages count back from the row's event, not from its latest item."""
        return self.are_gaps or self.request is not None

    def read_ages(self, batch: Features, ids: tf.Tensor) -> tf.Tensor:
        """Returns how old each item was at the row's event, or at its latest item.

        Not known is an age below 0: of an item after the event, or without a time; a time of 0 or
        less is none. A list that is shorter than that of the items is gaps of 0 behind its end.

        Args:
            batch: Features by name, `names` among them.
            ids: Ids of the items, int `[batch, length]`, 0 padding.

        Returns:
            Seconds, float32 `[batch, length]`; `UNKNOWN_AGE` where they are not known.
        """
        values = batch[self.name]
        if isinstance(values, tf.RaggedTensor):
            values = values.to_tensor(0)
        width, latest = tf.shape(ids)[1], self._read_reference(batch, values)
        missing = tf.maximum(width - tf.shape(values)[1], 0)
        values = tf.pad(values[:, :width], [[0, 0], [0, missing]])
        known = tf.not_equal(ids, 0)
        if self.are_gaps:
            ages = tf.cast(values, tf.float32)
        else:
            known &= values > 0
            # Whole numbers, as float32 tells neighbouring seconds of our time no longer apart.
            ages = tf.cast(latest[:, tf.newaxis] - values, tf.float32)
        ages *= self.seconds
        ages = tf.where(known & (ages >= 0), ages, UNKNOWN_AGE)  # NaN is not known either.
        return tf.ensure_shape(ages, ids.shape)

    def _read_reference(self, batch: Features, values: tf.Tensor) -> tf.Tensor:
        if self.request is None:
            return tf.reduce_max(values, axis=1)
        return tf.cast(tf.reshape(batch[self.request], [-1]), values.dtype)


def find_item_times(
    config: HSTUConfig, manifest: Manifest, sequence: FeatureSpec
) -> ItemTimes | None:
    """Returns where the times of a sequence's items stand; None: the config names none.

    Args:
        config: The model's config.
        manifest: The dataset version.
        sequence: The list of the items, with its bound.

    Raises:
        ConfigError: What it names is no list of times beside the sequence, or no time of the row.
    """
    if config.times is None:
        return None
    spec = bound_list(manifest, find_feature(manifest, config.times))
    _require_times("model.times", spec, is_list=True)
    if list_length(spec) != list_length(sequence):
        raise ConfigError(
            "times and items of a sequence stand in lists of one length",
            received=f"{spec.name}: {list_length(spec)}, {sequence.name}: {list_length(sequence)}",
            fix="build both with one max_len",
        )
    are_gaps = spec.dtype == "float32"
    if config.request_time is not None:
        if are_gaps:
            raise ConfigError(
                "gaps count back from the row's event: its time is not read beside them",
                received=f"model.times = {spec.name}, model.request_time = {config.request_time}",
                fix="leave model.request_time out",
            )
        _require_times(
            "model.request_time", find_feature(manifest, config.request_time), is_list=False
        )
    unit = _find_unit(spec.name, manifest, are_gaps)
    return ItemTimes(spec.name, config.request_time, _SECONDS[unit], are_gaps)


def _require_times(key: str, spec: FeatureSpec, *, is_list: bool) -> None:
    dtypes = ("float32", "int64") if is_list else ("int64",)
    is_number = spec.vocabulary_size is None and spec.dtype in dtypes
    is_plain = spec.encoding == "identity"
    if is_number and is_plain and spec.is_list == is_list and spec.role == "user":
        return
    raise ConfigError(
        f"{key} names no times" + (" beside a sequence" if is_list else " of the row"),
        received=f"{spec.name}: {spec.dtype} of shape {spec.shape}, role {spec.role}, encoding "
        f"{spec.encoding}",
        allowed="a list of role user, encoding identity: gaps (float32) or times (int64)"
        if is_list
        else "a whole number of role user, encoding identity",
        fix="build it of `gaps` of the history, or of a time column in its `columns`"
        if is_list
        else "build it of the time column of the log",
    )


def _find_unit(name: str, manifest: Manifest, are_gaps: bool) -> str:
    """Returns the unit that a build wrote times in; seconds where no build says it.

    Raises:
        ConfigError: They are logs of gaps.
    """
    config: Mapping[str, Any] = manifest.source.config
    if not are_gaps:
        return str((config.get("events") or {}).get("time_unit") or "s")
    features = {feature["name"]: feature for feature in config.get("features") or []}
    column = features.get(name, {}).get("column", name)
    made = [history.get("gaps") or {} for history in config.get("histories") or []]
    gaps = next((gaps for gaps in made if gaps.get("name") == column), {})
    if gaps.get("log"):
        raise ConfigError(
            "model.times reads gaps as they are: it buckets their logs itself",
            received=f"{name}: log(1 + gap)",
            fix=f"build {column} with log: false",
        )
    return str(gaps.get("unit", "s"))
