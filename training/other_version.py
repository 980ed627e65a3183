"""A run on another version of its dataset: the same weights, what they read as the run knows it.

What a run would score on rows that were built after it. Ids of the two versions are matched through
their vocabularies; a token that the run does not know, or no longer, reads the row that the run's
export reads for it. Values that the build has fitted anew since then (the mean of a normalized
column, say) are made once more by the run's own encoders, of the raw values of held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import CHECKPOINTS_DIR
from conf.encoders import RAW_PREFIX
from conf.errors import ConfigError, LaterLogError
from conf.manifest import Manifest
from conf.schema import OOV_ID, FeatureSchema
from conf.splits import TRAIN
from conf.storage.locations import find_path
from conf.training.input import FilterConfig
from conf.training.train import WarmStartConfig
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import RunReference, TrainedModel
from training.embedding.key_space import holding_whole_tables
from training.encoders.operations import hash_text
from training.encoders.serving import RawInput, ServingEncoders, build_serving_encoders
from training.encoders.vocabularies import (
    NO_ROW,
    EncodedVersion,
    Vocabulary,
    is_encoded_alike,
    list_fitted_anew,
    match_tokens,
    read_encoded_version,
    read_key_vocabulary,
)
from training.input.batches import Features
from training.loop.optimizers import Optimizers
from training.loop.warm_start import WarmTarget, transfer_weights
from training.models.model import Model
from training.models.ranking import NetworkRankingModel, RankingModel
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.network import StepContext
from training.reader.filters import EVALUATION_FILTER
from training.reader.training_data import TrainingData


def move_to_version(
    trained: TrainedModel, dataset: str, which: str = "best", split: str | None = None
) -> TrainedModel:
    """A run's model, of the checkpoint `which`, over the rows of another version, or a dataset's.

    `split` is the one to be measured, where that is known.
    """
    version_dir = resolve_version(find_path(dataset))
    manifest = read_manifest(version_dir, trained.config.input.tolerates)
    if manifest == trained.manifest:
        return trained
    _check_order(trained.manifest, manifest)
    here = read_encoded_version(version_dir, manifest)
    there = read_encoded_version(trained.version_dir, trained.manifest)
    model = trained.model
    changed = list_fitted_anew(model.inputs, model.embedded_features, here, there)
    own = _build_own_encoders(changed, here, there, split)
    encoded = _take_encodings(changed, here, there)
    with holding_whole_tables():
        model = build_model(trained.config.model, encoded.manifest, trained.config.seed)
    _set_weights(trained, model, encoded, which)
    if isinstance(model, NetworkRankingModel) and isinstance(trained.model, RankingModel):
        model.calibrate(trained.model.calibrations)
    if own is not None:
        model = _read_raw_values(model, own)
    return TrainedModel(trained.run_dir, model, trained.config, manifest, version_dir)


def require_filter(moved: TrainedModel) -> None:
    """Refuses a run's own `evaluation.filter` where its values mean something else there."""
    reference, config = RunReference.read(moved.run_dir), moved.config
    manifest = reference.read_manifest()
    here = read_encoded_version(moved.version_dir, moved.manifest)
    there = read_encoded_version(reference.version_dir, manifest)
    filters = config.evaluation.filter
    changed = [item.feature for item in filters if not _is_compared_alike(item, here, there)]
    if changed:
        raise ConfigError(
            f"{EVALUATION_FILTER} of the run compares values that mean something else in this "
            "version",
            received=", ".join(dict.fromkeys(changed)),
            allowed="ids of the same tokens, and features that were not fitted anew",
            fix=f"give the values of this version: --set '{EVALUATION_FILTER}=[...]', or [] for "
            "all rows",
        )


def _is_compared_alike(item: FilterConfig, here: EncodedVersion, there: EncodedVersion) -> bool:
    name, schema = item.feature, here.manifest.schema
    if name not in schema or schema[name].is_list:  # Of lists the length is compared.
        return True
    if is_encoded_alike(name, here, there):
        return True
    values = item.value if isinstance(item.value, tuple) else (item.value,)
    if item.op not in ("==", "!=", "in", "not_in") or not all(isinstance(v, int) for v in values):
        return False
    if any(version.plan.column(name).operation is not None for version in (here, there)):
        return False
    tokens = [_read_tokens(version, name, np.array(values)) for version in (here, there)]
    return tokens[0] is not None and tokens[0] == tokens[1]


def _read_tokens(version: EncodedVersion, name: str, ids: np.ndarray) -> list[Any] | None:
    """What ids stand for: their tokens, and the ids themselves where these are none."""
    vocabulary = read_key_vocabulary(version.version_dir, version.manifest, name)
    if vocabulary is None:
        return None
    tokens = vocabulary.take(ids).to_pylist()
    return [("id", i) if t is None else t for i, t in zip(ids.tolist(), tokens, strict=True)]


def _check_order(own: Manifest, other: Manifest) -> None:
    """Refuses a version whose held-out rows the run may have been trained on."""
    name, version = other.dataset_name, other.dataset_version
    if name != own.dataset_name:
        raise ConfigError(
            "a run can be measured on versions of its own dataset alone",
            received=f"{name}, and the run was trained on {own.dataset_name}",
            fix="name a version of the run's dataset",
        )
    if version < own.dataset_version:
        raise ConfigError(
            "this version is older than the one that the run was trained on: the run may have "
            "been trained on its held-out rows",
            received=version,
            allowed=f"{own.dataset_version}, or a later version",
            fix="measure both runs on the version of the later one",
        )
    ends = [_find_end(manifest) for manifest in (other, own)]
    if None not in ends and ends[0] < ends[1]:  # type: ignore[operator]
        raise LaterLogError(
            "this version was built later than the one that the run was trained on, of a log that "
            "ends earlier: the run may have been trained on its held-out rows",
            received=f"{version}, which ends {ends[0]}",
            allowed=f"a version that ends {ends[1]} or later",
            fix="measure on such a version, or on the run's own",
        )


def _find_end(manifest: Manifest) -> datetime | None:
    """Where the events of a version end; None: it has no times."""
    run, span = manifest.run, manifest.source.event_ts_ms_range
    days = [] if run is None else [*run.days, *filter(None, [run.last_day])]
    if days:
        return datetime.fromisoformat(max(days)).replace(tzinfo=UTC) + timedelta(days=1)
    return None if span is None else datetime.fromtimestamp(span[1] / 1000, UTC)


def _take_encodings(
    changed: Sequence[str], here: EncodedVersion, there: EncodedVersion
) -> EncodedVersion:
    """A version as if it encoded some features as another one does, and in its order.

    The order of features is that in which networks read them.
    """
    specs = {name: there.manifest.schema[name] for name in changed}
    columns = {name: there.plan.column(name) for name in changed}
    place = {name: number for number, name in enumerate(there.manifest.schema.names)}
    features = tuple(
        specs.get(spec.name, spec)
        for spec in sorted(
            here.manifest.schema.features, key=lambda spec: place.get(spec.name, len(place))
        )
    )
    manifest = replace(here.manifest, schema=FeatureSchema(features))
    encodings = tuple(columns.get(column.feature, column) for column in here.plan.columns)
    return EncodedVersion(here.version_dir, manifest, replace(here.plan, columns=encodings))


def _set_weights(trained: TrainedModel, model: Model, encoded: EncodedVersion, which: str) -> None:
    checkpoint = list_checkpoints(trained.run_dir / CHECKPOINTS_DIR / which)[-1].path
    warm = WarmStartConfig(path=str(checkpoint), moments="reset", mismatched="refuse")
    fit = trained.config.fit.model_copy(update={"warm_start": warm})
    config = trained.config.model_copy(update={"fit": fit})
    data = TrainingData(encoded.version_dir, encoded.manifest)
    target = WarmTarget(model, Optimizers(config.optimizer, model, 1), data, encoded)
    transfer_weights(config, target, match_served)


def match_served(new: Vocabulary, old: Vocabulary) -> np.ndarray | None:
    """Returns the id that the earlier encoders give the token of each id, int64 `[new.size]`.

    Unknown and retired tokens have their bucket, or OOV. None: the earlier buckets of unknown
    tokens are not those of the new ids.
    """
    if old.oov_buckets is not None and new.oov_buckets != old.oov_buckets:
        return None
    rows = match_tokens(new, old)
    if old.retired is not None:
        is_gone = np.concatenate([np.zeros(old.first_id, np.bool_), old.retired])
        rows[(rows != NO_ROW) & is_gone[rows]] = NO_ROW
    unknown = np.full(new.size, OOV_ID, np.int64)
    if old.oov_buckets is not None:
        texts = new.tokens.cast(pa.string()).to_numpy(zero_copy_only=False)
        unknown[new.first_id :] = hash_text(tf.constant(texts, tf.string), old.oov_buckets)
    return np.where(rows == NO_ROW, unknown, rows)


_RAW_WIRE = {"int64": "int64", "float32": "float32", "float64": "bytes", "string": "bytes"}
"""Type of the records' feature that holds raw values of a type."""


def _build_own_encoders(
    changed: Sequence[str], here: EncodedVersion, there: EncodedVersion, split: str | None
) -> OwnEncoders | None:
    """The encoders of the run, `there`, for features whose raw values rows of `here` hold."""
    if not changed:
        return None
    missing = [name for name in changed if not _is_declared_alike(name, here, there)]
    if not missing:
        encoders = build_serving_encoders(there.version_dir, there.plan, changed)
        missing = sorted({i.feature for i in encoders.inputs if not _holds_raw(here, i)})
        if not missing and split != TRAIN:
            return OwnEncoders(encoders)
    raise ConfigError(
        "the versions compute features in other ways, so the run would read wrong values",
        received=", ".join(missing or changed),
        allowed="features of a vocabulary that are embedded; those that were fitted anew, in rows "
        "that hold their raw values, which those of train do not; others as they were",
        fix="keep the feature's column and encoding, or train the run again on this version"
        if missing
        else "measure on another split than train",
    )


def _is_declared_alike(name: str, here: EncodedVersion, there: EncodedVersion) -> bool:
    """Whether a feature is made by one kind of operation of the same columns."""
    found = [c for v in (here, there) for c in v.plan.columns if c.feature == name]
    if len(found) < 2 or any(column.operation is None for column in found):
        return False
    columns = [[(raw.name, raw.dtype, raw.is_list) for raw in c.inputs] for c in found]
    return type(found[0].operation) is type(found[1].operation) and columns[0] == columns[1]


def _holds_raw(version: EncodedVersion, item: RawInput) -> bool:
    name, schema = f"{RAW_PREFIX}{item.column}", version.manifest.schema
    return name in schema and schema[name].is_list and schema[name].dtype == _RAW_WIRE[item.dtype]


@dataclass(frozen=True)
class OwnEncoders:
    """A run's own encoders of features that records encode in another way, over raw values."""

    encoders: ServingEncoders

    def read_instead(self, names: Iterable[str]) -> tuple[str, ...]:
        """The features of the records that some inputs of the model are made of."""
        made: dict[str, list[str]] = {}
        for item in self.encoders.inputs:
            made.setdefault(item.feature, []).append(f"{RAW_PREFIX}{item.column}")
        return tuple(dict.fromkeys(read for name in names for read in made.get(name, [name])))

    def encode(self, features: Features, names: Sequence[str]) -> dict[str, Any]:
        """Inputs of the model, those of other encodings made of raw values."""
        items = [item for item in self.encoders.inputs if item.feature in names]
        raw = {item.name: _read_raw(features[f"{RAW_PREFIX}{item.column}"], item) for item in items}
        encoded = self.encoders.encode(raw, {item.feature for item in items})
        return {name: encoded.get(name, features.get(name)) for name in names}


def _read_raw(values: tf.RaggedTensor, item: RawInput) -> tf.Tensor:
    """Raw values as the encoders take them: `[batch]`, or `[batch, length]` of lists."""
    if item.dtype == "float64":
        values = values.with_flat_values(tf.strings.to_number(values.flat_values, tf.float64))
    if item.is_list:
        return values.to_tensor(tf.cast(item.pad_token, values.dtype), shape=[None, item.length])
    return values.to_tensor(tf.cast(item.null_token, values.dtype), shape=[None, 1])[:, 0]


def _read_raw_values(model: Model, own: OwnEncoders) -> Model:
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
        return self._own.read_instead(self._model.inputs)

    def compute_logits(
        self, features: Features, training: StepContext | None = None
    ) -> dict[str, tf.Tensor]:
        return self._model.compute_logits(self._encode(features), training)

    def compute_uncalibrated_logits(self, features: Features) -> dict[str, tf.Tensor]:
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

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        names = self._model.user_inputs
        return self._model.embed_users(self._own.encode(features, names), training)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        names = self._model.item_inputs
        return self._model.embed_items(self._own.encode(features, names), training)
