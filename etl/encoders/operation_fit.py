"""From encodings to operations: some are what the config says, some are fitted, some are kept."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import DateRange
from conf.encoders import EncoderPlan, TableSpec, fold_column
from conf.errors import ConfigError, InputDataError
from conf.etl.encodings import (
    CountConfig,
    CrossConfig,
    FeatureConfig,
    LengthConfig,
    MultiHotConfig,
    NormalizeConfig,
    QuantileConfig,
    SparseIndicesConfig,
    TargetConfig,
)
from conf.local_paths import local_path
from conf.operations import (
    Bucketize,
    Cross,
    DatePart,
    Length,
    MultiHot,
    Normalize,
    Operation,
    SparseIndices,
    Statistic,
)
from conf.schema import OOV_ID
from etl.encoders.numbers import FittedNumbers, NumberRequest, fit_numbers
from etl.encoders.target import (
    TargetFit,
    add_folds,
    build_statistic_table,
    fit_counts,
    fit_target,
    load_statistic_table,
    write_statistic_table,
)
from etl.encoders.vocabulary import first_token_id, load_vocabulary
from etl.events.down_sampling import before_sampling
from etl.events.splits import is_inside
from etl.features.plan import FeaturePlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MAX_MULTI_HOT = 10_000  # a vector of 40 kB per row
_MAX_INDICES = 2**53


@dataclass(frozen=True)
class TrainSplit:
    """The rows that encoders are fitted on.

    Attributes:
        rows: The events of the train split, with `__skip`: what vocabularies are fitted on.
        key: Columns that tell rows apart, the same ones in every record.
        time_column_ms: Event time, milliseconds since the epoch, or None.
        label: Name of the build's label, or None.
        data_dir: Directory that relative paths of files of tokens start from.
        dates: Days whose events become samples; None: all.
    """

    rows: DataFrame
    key: tuple[str, ...]
    time_column_ms: str | None
    label: str | None
    data_dir: str = "."
    dates: DateRange | None = None

    def find_file(self, path: str) -> Path:
        """Returns where a file of tokens lies."""
        return local_path(self.data_dir) / local_path(path)

    @property
    def samples(self) -> DataFrame:
        """What numbers and statistics are fitted on: other events have no label, or no record."""
        samples = before_sampling(self.rows)
        return samples if self.dates is None else samples.where(is_inside(self.dates))


@dataclass(frozen=True)
class EarlierEncoders:
    """Encoders of an earlier version, which a new one continues.

    Attributes:
        version: The version's id.
        directory: Where their files lie.
        plan: What they do.
        kept: The features whose fitted numbers the new version keeps.
    """

    version: str
    directory: Path
    plan: EncoderPlan
    kept: frozenset[str] = frozenset()

    def find_operation(self, feature: str) -> Operation | None:
        """Returns the operation of a feature that is kept as it is, or None."""
        operation = self.plan.column(feature).operation if feature in self.kept else None
        return None if isinstance(operation, Statistic) else operation

    def find_statistics(self, feature: str, vocabulary: pa.Table) -> np.ndarray | None:
        """Returns what is known of the tokens of a vocabulary; None: the feature is fitted anew.

        Args:
            feature: A feature with a statistic per token.
            vocabulary: The new vocabulary.

        Returns:
            float64 `[vocabulary_size, columns]`, NaN where the earlier version lacks the token.

        Raises:
            InputDataError: Files of the earlier version are damaged.
        """
        operation = self.plan.column(feature).operation if feature in self.kept else None
        if not isinstance(operation, Statistic):
            return None
        known = load_vocabulary(self.directory, self.plan.vocabulary(operation.vocabulary))
        [spec] = [table for table in self.plan.tables if table.name == operation.table]
        table = load_statistic_table(self.directory, spec)
        earlier = np.stack([column.to_numpy() for column in table.columns], axis=1)
        first, known_first = first_token_id(vocabulary), first_token_id(known)
        places = pc.index_in(vocabulary["token"], value_set=known["token"].combine_chunks())
        rows = places.fill_null(-1).to_numpy().astype(np.int64)
        # What is no token (padding, unknown and its buckets) has the same value in each row.
        rows = np.concatenate([np.full(first, OOV_ID), np.where(rows < 0, -1, rows + known_first)])
        return np.where((rows < 0)[:, None], np.nan, earlier[rows].astype(np.float64))


def fit_operations(
    train: TrainSplit,
    plan: FeaturePlan,
    vocabularies: Mapping[str, pa.Table],
    directory: Path,
    earlier: EarlierEncoders | None = None,
) -> tuple[dict[str, Operation], list[TableSpec]]:
    """Makes the operation of each feature that needs one.

    Args:
        train: The train split.
        plan: The features.
        vocabularies: The fitted vocabularies, by name.
        directory: Where tables of statistics go.
        earlier: Encoders whose numbers may be kept; None: all are fitted.

    Returns:
        Operation by feature, and the tables that were written.

    Raises:
        ConfigError: A vocabulary is too large for a vector, or there is no label.
        InputDataError: A column has nothing to fit.
    """
    operations: dict[str, Operation] = {}
    tables: list[TableSpec] = []
    known = {
        feature.name: operation
        for feature in plan.features
        if earlier is not None and (operation := earlier.find_operation(feature.name)) is not None
    }
    fitted = fit_numbers(train.samples, _number_requests(plan, known), train.key)
    for feature in plan.features:
        config = feature.encoding
        if feature.name in known:
            operations[feature.name] = known[feature.name]
        elif (stated := config.state()) is not None:
            operations[feature.name] = stated
        elif isinstance(config, CrossConfig):
            operations[feature.name] = _cross(feature, config, fitted)
        elif isinstance(config, LengthConfig):
            operations[feature.name] = Length(feature.max_len)
        elif isinstance(config, NormalizeConfig):
            operations[feature.name] = _normalize(config, fitted.get(feature.name))
        elif isinstance(config, QuantileConfig):
            operations[feature.name] = _equally_full(fitted[feature.name])
        elif isinstance(config, SparseIndicesConfig):
            operations[feature.name] = _sparse_indices(feature, config, fitted)
        elif isinstance(config, MultiHotConfig):
            operations[feature.name] = _multi_hot(feature, config, vocabularies)
        elif isinstance(config, TargetConfig | CountConfig):
            vocabulary = vocabularies[feature.vocabulary or ""]
            values = _fit_statistics(train, feature, vocabulary, earlier)
            path = directory / f"{feature.name}.table.parquet"
            tables.append(write_statistic_table(build_statistic_table(values), path))
            operations[feature.name] = Statistic(feature.vocabulary or "", feature.name)
    return operations, tables


def _cross(
    feature: FeatureConfig, config: CrossConfig, fitted: Mapping[str, FittedNumbers]
) -> Cross:
    if not config.prepared:
        return Cross(config.buckets)
    made: list[Bucketize | DatePart | None] = []
    for column in feature.columns:
        own: Any = config.prepared.get(column)
        if isinstance(own, QuantileConfig):
            made.append(_equally_full(fitted[_part(feature, column)]))
        else:
            made.append(None if own is None else own.state())
    return Cross(config.buckets, tuple(made))


def _equally_full(fitted: FittedNumbers) -> Bucketize:
    return Bucketize(tuple(sorted(set(fitted.quantiles))))


def _number_requests(plan: FeaturePlan, known: Container[str]) -> dict[str, NumberRequest]:
    requests = {}
    for feature in plan.features:
        if feature.name in known:
            continue
        config = feature.encoding
        request = NumberRequest(feature.column, plan.is_list(feature.column))
        if isinstance(config, NormalizeConfig) and config.method is not None:
            quartiles = (0.25, 0.5, 0.75) if config.method == "robust" else ()
            requests[feature.name] = replace(
                request, prepare=_preparation(config), probabilities=quartiles
            )
        elif isinstance(config, QuantileConfig):
            requests[feature.name] = replace(request, probabilities=_inner(config))
        elif isinstance(config, CrossConfig):
            for column, own in config.prepared.items():
                if isinstance(own, QuantileConfig):
                    requests[_part(feature, column)] = NumberRequest(
                        column, plan.is_list(column), probabilities=_inner(own)
                    )
        elif isinstance(config, SparseIndicesConfig) and config.sizes is None:
            for column in feature.columns:
                requests[_part(feature, column)] = replace(request, column=column)
    return requests


def _inner(config: QuantileConfig) -> tuple[float, ...]:
    return tuple(i / config.buckets for i in range(1, config.buckets))


def _part(feature: FeatureConfig, column: str) -> str:
    """Name of what is fitted for one column of a feature that reads several."""
    return f"{feature.name}#{column}"


def _preparation(config: NormalizeConfig) -> Normalize:
    return Normalize(
        fill=config.fill_missing,
        minimum=config.clip.minimum if config.clip else None,
        maximum=config.clip.maximum if config.clip else None,
        log1p=config.log1p,
    )


def _normalize(config: NormalizeConfig, fitted: FittedNumbers | None) -> Normalize:
    prepared = _preparation(config)
    if config.constants is not None:
        return replace(prepared, center=config.constants.center, factor=1 / config.constants.scale)
    if fitted is None:
        return prepared
    moments = fitted.moments
    if config.method == "standard":
        center, spread = moments.mean, moments.deviation
    elif config.method == "min_max":
        center, spread = moments.minimum, moments.maximum - moments.minimum
    else:
        low, center, high = fitted.quantiles
        spread = high - low
    with np.errstate(divide="ignore", over="ignore"):
        factor = float(np.float64(1.0) / np.float64(spread))
    # A constant column has no spread to divide by: its values become 0.
    return replace(prepared, center=center, factor=factor if np.isfinite(factor) else 1.0)


def _sparse_indices(
    feature: FeatureConfig, config: SparseIndicesConfig, fitted: Mapping[str, FittedNumbers]
) -> SparseIndices:
    if config.sizes is not None:
        return SparseIndices(config.sizes)
    highest = [fitted[_part(feature, column)].moments.maximum for column in feature.columns]
    if not 0 <= min(highest) <= max(highest) < _MAX_INDICES:
        raise InputDataError(
            f"feature {feature.name!r} has no index space: its highest indices are out of range",
            received=", ".join(f"{index:.0f}" for index in highest),
            allowed=f"0 to {_MAX_INDICES - 1}",
            fix="declare `sizes`, or clean the column",
        )
    return SparseIndices(tuple(int(index) + 1 for index in highest))


def _multi_hot(
    feature: FeatureConfig, config: MultiHotConfig, vocabularies: Mapping[str, pa.Table]
) -> MultiHot:
    name = feature.vocabulary or ""
    size = first_token_id(vocabularies[name]) + len(vocabularies[name])
    if size > _MAX_MULTI_HOT:
        raise ConfigError(
            f"feature {feature.name!r} would be a vector of {size:,} numbers per row",
            allowed=f"at most {_MAX_MULTI_HOT:,}",
            fix="set `max_size`, or encode it by `vocabulary`, which keeps a list of ids",
        )
    return MultiHot(name, size, config.weights is not None)


def _fit_statistics(
    train: TrainSplit, feature: FeatureConfig, vocabulary: pa.Table, earlier: EarlierEncoders | None
) -> np.ndarray:
    """Fits a statistic per token; tokens of an earlier version may keep theirs."""
    known = None if earlier is None else earlier.find_statistics(feature.name, vocabulary)
    if known is not None and not np.isnan(known).any():
        return known
    if isinstance(feature.encoding, CountConfig):
        values = fit_counts(vocabulary, feature.encoding.log1p)
    else:
        values = _fit_target(train, feature, cast(TargetConfig, feature.encoding), vocabulary)
    return values if known is None else np.where(np.isnan(known), values, known)


def _fit_target(
    train: TrainSplit, feature: FeatureConfig, config: TargetConfig, vocabulary: pa.Table
) -> np.ndarray:
    label = config.label or train.label
    if label is None:
        raise ConfigError(
            f"feature {feature.name!r} encodes a target, but the build has no label",
            fix="declare `label`, or set the encoding's `label` to a numeric column",
        )
    fit = TargetFit(
        feature.column, label, fold_column(config.folds), config.folds, config.prior_weight
    )
    return fit_target(add_folds(train.samples, (config.folds,), train.key), vocabulary, fit)
