"""A model with its own run's encoders in front: it reads raw values, whatever was fitted anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from conf.encoders import RAW_PREFIX, ColumnEncoding
from conf.errors import ConfigError
from conf.splits import TRAIN
from training.encoders.vocabularies import EncodedVersion
from training.export.serving_encoders import RawInput, ServingEncoders, build_serving_encoders
from training.input.batches import Features
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.network import TrainingPass

_RAW_WIRE = {"int64": "int64", "float32": "float32", "float64": "bytes", "string": "bytes"}
"""Type of the records' feature that holds raw values of a type."""


def build_own_encoders(
    changed: Sequence[str], here: EncodedVersion, there: EncodedVersion, split: str | None
) -> OwnEncoders | None:
    """Builds the run's encoders of features that mean something else in the other version.

    Args:
        changed: Those features.
        here: The other version.
        there: The version that the run was trained on.
        split: Split whose rows are read; None: any but train.

    Returns:
        None where no feature has changed.

    Raises:
        ConfigError: The rows of the other version do not hold the raw values of each.
    """
    if not changed:
        return None
    encoders = None
    missing = [name for name in changed if not _is_declared_alike(name, here, there)]
    if not missing:
        encoders = build_serving_encoders(there.version_dir, there.plan, changed)
        missing = sorted({i.feature for i in encoders.inputs if not _holds_raw(here, i)})
    if missing or encoders is None or split == TRAIN:
        raise ConfigError(
            "the versions compute features in other ways, so the run would read wrong values",
            received=", ".join(missing or changed),
            allowed="features of a vocabulary that are embedded; those that were fitted anew, in "
            "rows that hold their raw values, which those of train do not; others as they were",
            fix="measure on another split than train"
            if not missing
            else "build this version again, if an earlier release of Sluice has built it; or keep "
            "the feature's column and encoding; or train the run again on this version",
        )
    return OwnEncoders(encoders)


def _is_declared_alike(name: str, here: EncodedVersion, there: EncodedVersion) -> bool:
    """Whether a feature is made by one kind of operation of the same columns."""
    found = [c for v in (here, there) for c in v.plan.columns if c.feature == name]
    if len(found) < 2 or any(column.operation is None for column in found):
        return False
    new, old = found
    return type(new.operation) is type(old.operation) and _columns(new) == _columns(old)


def _columns(column: ColumnEncoding) -> list[tuple[str, str, bool]]:
    return [(raw.name, raw.dtype, raw.is_list) for raw in column.inputs]


def _holds_raw(version: EncodedVersion, item: RawInput) -> bool:
    name, schema = f"{RAW_PREFIX}{item.column}", version.manifest.schema
    return name in schema and schema[name].is_list and schema[name].dtype == _RAW_WIRE[item.dtype]


@dataclass(frozen=True)
class OwnEncoders:
    """A run's own encoders, over raw values as records hold them.

    Attributes:
        encoders: Of the features that the records encode in another way.
    """

    encoders: ServingEncoders

    def read_instead(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the features of the records that some inputs of the model are made of."""
        made: dict[str, list[str]] = {}
        for item in self.encoders.inputs:
            made.setdefault(item.feature, []).append(f"{RAW_PREFIX}{item.column}")
        return tuple(dict.fromkeys(read for name in names for read in made.get(name, [name])))

    def encode(self, features: Features, names: Sequence[str]) -> dict[str, Any]:
        """Returns inputs of the model, those of other encodings made of raw values.

        Args:
            features: Features of a batch, as `read_instead` names them.
            names: The inputs.
        """
        items = [item for item in self.encoders.inputs if item.feature in names]
        raw = {item.name: _read_raw(features[f"{RAW_PREFIX}{item.column}"], item) for item in items}
        encoded = self.encoders.encode(raw, {item.feature for item in items})
        return {name: encoded.get(name, features.get(name)) for name in names}


def _read_raw(values: tf.RaggedTensor, item: RawInput) -> tf.Tensor:
    """Returns raw values as the encoders take them: `[batch]`, or `[batch, length]` of lists."""
    if item.dtype == "float64":
        values = values.with_flat_values(tf.strings.to_number(values.flat_values, tf.float64))
    default = tf.cast(item.pad_token, values.dtype) if item.is_list else None
    if item.is_list:
        return values.to_tensor(default, shape=[None, item.length])
    return values.to_tensor(tf.cast(item.null_token, values.dtype), shape=[None, 1])[:, 0]


def read_raw_inputs(model: Model, own: OwnEncoders) -> Model:
    """Returns a model that encodes raw values of the rows by its own run's encoders."""
    if isinstance(model, RankingModel):
        return RawRanking(model, own)
    return RawTowers(require_retrieval(model), own)


class RawRanking(RankingModel):
    """A ranking model some of whose inputs are made of raw values."""

    def __init__(self, model: RankingModel, own: OwnEncoders) -> None:
        super().__init__("raw", model.tasks)
        self.tables, self.calibrations = model.tables, model.calibrations
        self._model, self._own = model, own

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the features that records are asked for."""
        return self._own.read_instead(self._model.inputs)

    def compute_logits(
        self, features: Features, training: TrainingPass | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the logits of each task."""
        return self._model.compute_logits(self._encode(features), training)

    def compute_uncalibrated_logits(self, features: Features) -> dict[str, tf.Tensor]:
        """Returns the logits of each task before they are calibrated."""
        return self._model.compute_uncalibrated_logits(self._encode(features))

    def _encode(self, features: Features) -> dict[str, Any]:
        return self._own.encode(features, self._model.inputs)


class RawTowers(RetrievalModel):
    """A retrieval model some of whose inputs are made of raw values."""

    def __init__(self, model: RetrievalModel, own: OwnEncoders) -> None:
        super().__init__(name="raw")
        self.user_inputs = own.read_instead(model.user_inputs)
        self.item_inputs = own.read_instead(model.item_inputs)
        self.temperature, self.tables = model.temperature, model.tables
        self.interests = model.interests
        self._model, self._own = model, own

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns user vectors, one or several of a row."""
        names = self._model.user_inputs
        return self._model.embed_users(self._own.encode(features, names), training)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, dim]`."""
        names = self._model.item_inputs
        return self._model.embed_items(self._own.encode(features, names), training)
