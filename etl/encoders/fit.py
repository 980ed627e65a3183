"""The fit of encoders on the train split, and the plan that they make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders import (
    IDENTITY,
    ColumnEncoding,
    EncoderPlan,
    RawColumn,
    RawDType,
    TableSpec,
    VocabularySpec,
)
from conf.encoders.bags import Length, MultiHot, SparseIndices
from conf.encoders.hashing import Cross
from conf.encoders.numbers import Bucketize, Normalize
from conf.encoders.target import FOLD_COLUMN, Statistic
from conf.errors import ConfigError, InputDataError
from conf.etl.encodings import (
    BagWeightsConfig,
    CountConfig,
    CrossConfig,
    Encoding,
    FeatureConfig,
    IdentityConfig,
    LengthConfig,
    MultiHotConfig,
    NormalizeConfig,
    QuantileConfig,
    SparseIndicesConfig,
    TargetConfig,
)
from conf.local_paths import local_path
from conf.schema import OOV_ID, DType, FeatureSchema, FeatureSpec
from conf.storage.table_files import read_parquet
from etl.encoders.feature_plan import FeaturePlan
from etl.encoders.joined_vocabulary import read_tokens
from etl.encoders.number_fit import (
    FittedNumbers,
    NumberRequest,
    add_folds,
    fit_counts,
    fit_numbers,
    fit_target,
)
from etl.encoders.vocabulary import (
    build_statistic_table,
    first_token_id,
    load_statistic_table,
    load_vocabulary,
    read_values,
    write_statistic_table,
)
from etl.events.sampling import before_sampling
from etl.events.splits import is_inside

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.dates import DateRange
    from conf.encoders.declaration import Operation

_MAX_MULTI_HOT = 10_000  # a vector of 40 kB per row
_MAX_INDICES = 2**53
_WIRE_DTYPES: dict[str, DType] = {
    "int64": "int64",
    "float32": "float32",
    "float64": "float32",
    "string": "bytes",
    "bytes": "bytes",
}


@dataclass(frozen=True)
class TrainSplit:
    """The rows that encoders are fitted on."""

    rows: DataFrame  # the events of train, with `__skip`: what vocabularies are fitted on
    key: tuple[str, ...]  # columns that tell rows apart, the same ones in every record
    time_column_ms: str | None  # event time, milliseconds since the epoch
    label: str | None  # the build's
    data_dir: str = "."  # relative paths of files of tokens start here
    dates: DateRange | None = None  # whose events become samples; None: all

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
    """Encoders of an earlier version, which a new one continues."""

    version: str
    directory: Path
    plan: EncoderPlan
    kept: frozenset[str] = frozenset()  # features whose fitted numbers the new version keeps

    def find_kept(self, feature: str) -> Operation | None:
        """Returns the operation of a feature whose fitted numbers are kept, or None."""
        return self.plan.column(feature).operation if feature in self.kept else None


@dataclass(frozen=True)
class OperationFit:
    """What operations are fitted on, and by feature and column the numbers of the train split."""

    train: TrainSplit
    vocabularies: Mapping[str, VocabularySpec]
    directory: Path  # of the vocabularies, where tables of statistics go
    earlier: EarlierEncoders | None
    numbers: Mapping[str, FittedNumbers]
    tables: list[TableSpec] = field(default_factory=list)  # that were written

    def numbers_of(self, feature: FeatureConfig) -> list[FittedNumbers]:
        """Returns what was fitted of the columns of a feature, in their order."""
        names = [name_request(feature, column) for column in feature.columns]
        return [self.numbers[name] for name in names if name in self.numbers]


def fit_operations(
    train: TrainSplit,
    plan: FeaturePlan,
    vocabularies: Sequence[VocabularySpec],
    directory: Path,
    earlier: EarlierEncoders | None = None,
) -> tuple[dict[str, Operation], list[TableSpec]]:
    """Makes the operation of each feature that needs one, and the tables of statistics.

    The vocabularies lie in the directory. Numbers of earlier encoders may be kept; where there are
    none, all are fitted.
    """
    operations: dict[str, Operation] = {}
    requests: dict[str, NumberRequest] = {}
    fitted: list[FeatureConfig] = []
    for feature in plan.features:
        config = feature.encoding
        kept = None if earlier is None else earlier.find_kept(feature.name)
        # A statistic is kept token by token: those that are new are fitted.
        stated = kept if kept is not None and not isinstance(kept, Statistic) else config.state()
        if stated is not None:
            operations[feature.name] = stated
        elif config.operation is not None:
            fitted.append(feature)
            requests |= _request_numbers(feature, plan)
    numbers = fit_numbers(train.samples, requests, train.key)
    specs = {spec.name: spec for spec in vocabularies}
    fit = OperationFit(train, specs, directory, earlier, numbers)
    for feature in fitted:
        operations[feature.name] = fit_operation(feature.encoding, feature, fit)
    return operations, fit.tables


def name_request(feature: FeatureConfig, column: str) -> str:
    """Returns the name of what is fitted for one column of a feature."""
    return feature.name if column == feature.column else f"{feature.name}#{column}"


def _request_numbers(feature: FeatureConfig, plan: FeaturePlan) -> dict[str, NumberRequest]:
    """The numbers of the train split that an encoding is fitted to, by name."""
    config, column, is_list = feature.encoding, feature.column, plan.is_list(feature.column)
    found: dict[str, NumberRequest] = {}
    match config:
        case NormalizeConfig():
            quartiles = (0.25, 0.5, 0.75) if config.method == "robust" else ()
            found[column] = NumberRequest(column, is_list, config.preparation, quartiles)
        case SparseIndicesConfig():
            found = {own: NumberRequest(own, is_list) for own in feature.columns}
        case QuantileConfig():
            found[column] = _request_quantiles(config, column, plan)
        case CrossConfig():
            found = {
                own: _request_quantiles(prepared, own, plan)
                for own, prepared in config.prepared.items()
                if isinstance(prepared, QuantileConfig)
            }
    return {name_request(feature, own): request for own, request in found.items()}


def _request_quantiles(config: QuantileConfig, column: str, plan: FeaturePlan) -> NumberRequest:
    inner = tuple(i / config.buckets for i in range(1, config.buckets))
    return NumberRequest(column, plan.is_list(column), probabilities=inner)


@singledispatch
def fit_operation(config: Encoding, feature: FeatureConfig, fit: OperationFit) -> Operation:
    """Makes the operation of a feature where the config does not state it."""
    raise NotImplementedError(f"nothing fits {config.kind!r}")


@fit_operation.register(NormalizeConfig)
def _(config: NormalizeConfig, feature: FeatureConfig, fit: OperationFit) -> Normalize:
    (fitted,) = fit.numbers_of(feature)
    if config.method == "standard":
        center, spread = fitted.mean, fitted.deviation
    elif config.method == "min_max":
        center, spread = fitted.minimum, fitted.maximum - fitted.minimum
    else:
        low, center, high = fitted.quantiles
        spread = high - low
    with np.errstate(divide="ignore", over="ignore"):
        factor = float(np.float64(1.0) / np.float64(spread))
    # A constant column has no spread to divide by: its values become 0.
    factor = factor if np.isfinite(factor) else 1.0
    return replace(config.preparation, center=center, factor=factor)


def _cut_equally(fitted: FittedNumbers) -> Bucketize:
    return Bucketize(tuple(sorted(set(fitted.quantiles))))


@fit_operation.register(QuantileConfig)
def _(config: QuantileConfig, feature: FeatureConfig, fit: OperationFit) -> Bucketize:
    return _cut_equally(*fit.numbers_of(feature))


@fit_operation.register(CrossConfig)
def _(config: CrossConfig, feature: FeatureConfig, fit: OperationFit) -> Cross:
    if not config.prepared:
        return Cross(config.buckets)
    made: list[Operation | None] = []
    for column in feature.columns:
        own = config.prepared.get(column)
        if isinstance(own, QuantileConfig):
            made.append(_cut_equally(fit.numbers[name_request(feature, column)]))
        else:
            made.append(None if own is None else own.state())
    return Cross(config.buckets, tuple(made))


@fit_operation.register(SparseIndicesConfig)
def _(config: SparseIndicesConfig, feature: FeatureConfig, fit: OperationFit) -> SparseIndices:
    highest = [numbers.maximum for numbers in fit.numbers_of(feature)]
    if not 0 <= min(highest) <= max(highest) < _MAX_INDICES:
        raise InputDataError(
            f"feature {feature.name!r} has no index space: its highest indices are out of range",
            received=", ".join(f"{index:.0f}" for index in highest),
            allowed=f"0 to {_MAX_INDICES - 1}",
            fix="declare `sizes`, or clean the column",
        )
    return SparseIndices(tuple(int(index) + 1 for index in highest))


@fit_operation.register(LengthConfig)
def _(config: LengthConfig, feature: FeatureConfig, fit: OperationFit) -> Length:
    return Length(feature.max_len)


@fit_operation.register(MultiHotConfig)
def _(config: MultiHotConfig, feature: FeatureConfig, fit: OperationFit) -> MultiHot:
    spec = fit.vocabularies[cast(str, feature.vocabulary)]
    if spec.size > _MAX_MULTI_HOT:
        raise ConfigError(
            f"feature {feature.name!r} would be a vector of {spec.size:,} numbers per row",
            allowed=f"at most {_MAX_MULTI_HOT:,}",
            fix="set `max_size`, or encode it by `vocabulary`, which keeps a list of ids",
        )
    return MultiHot(spec.name, spec.size, config.weights is not None)


@fit_operation.register(CountConfig)
def _(config: CountConfig, feature: FeatureConfig, fit: OperationFit) -> Statistic:
    spec = fit.vocabularies[cast(str, feature.vocabulary)]

    def compute() -> np.ndarray:
        counts = read_parquet(fit.directory / spec.file, ["count"])["count"].to_numpy()
        return fit_counts(counts, spec.first_token_id, config.log1p)

    return _fit_statistic(feature, fit, compute)


@fit_operation.register(TargetConfig)
def _(config: TargetConfig, feature: FeatureConfig, fit: OperationFit) -> Statistic:
    spec = fit.vocabularies[cast(str, feature.vocabulary)]
    label = cast(str, fit.train.label)

    def compute() -> np.ndarray:
        rows = add_folds(fit.train.samples, fit.train.key)
        tokens = read_tokens(rows.sparkSession, fit.directory, spec)
        return fit_target(rows, tokens, spec, feature.column, label)

    return _fit_statistic(feature, fit, compute)


def _fit_statistic(
    feature: FeatureConfig, fit: OperationFit, compute: Callable[[], np.ndarray]
) -> Statistic:
    """Writes a statistic per token; tokens of an earlier version may keep theirs."""
    name = cast(str, feature.vocabulary)
    kept = None if fit.earlier is None else fit.earlier.find_kept(feature.name)
    if fit.earlier is None or not isinstance(kept, Statistic):
        values = compute()
    else:
        vocabulary = load_vocabulary(fit.directory, fit.vocabularies[name])
        values = _find_known(fit.earlier, kept, vocabulary)
        unknown = np.isnan(values)
        values = np.where(unknown, compute(), values) if unknown.any() else values
    path = fit.directory / f"{feature.name}.table.parquet"
    fit.tables.append(write_statistic_table(build_statistic_table(values), path))
    return Statistic(name, feature.name)


def _find_known(earlier: EarlierEncoders, operation: Statistic, vocabulary: pa.Table) -> np.ndarray:
    """Returns the earlier statistics of a vocabulary's tokens, NaN of those that were not there."""
    known = load_vocabulary(earlier.directory, earlier.plan.vocabulary(operation.vocabulary))
    [spec] = [table for table in earlier.plan.tables if table.name == operation.table]
    values = read_values(load_statistic_table(earlier.directory, spec)).astype(np.float64)
    first, known_first = first_token_id(vocabulary), first_token_id(known)
    places = pc.index_in(vocabulary["token"], value_set=known["token"].combine_chunks())
    rows = places.fill_null(-1).to_numpy().astype(np.int64)
    # What is no token (padding, unknown and its buckets) has the same value in each row.
    rows = np.concatenate([np.full(first, OOV_ID), np.where(rows < 0, -1, rows + known_first)])
    return np.where((rows < 0)[:, None], np.nan, values[rows])


def build_plan(
    plan: FeaturePlan,
    vocabularies: Sequence[VocabularySpec],
    operations: Mapping[str, Operation],
    tables: Sequence[TableSpec] = (),
) -> EncoderPlan:
    """Builds the plan: features without an operation are identities and plain vocabularies."""
    sizes = {vocabulary.name: vocabulary.size for vocabulary in vocabularies}
    specs, columns = [], []
    for feature in plan.features:
        operation = operations.get(feature.name)
        dtype = cast("RawDType", plan.value_type(feature.column))
        if operation is None:
            specs.append(_describe_plain(plan, feature, sizes))
            inputs: tuple[RawColumn, ...] = ()
        else:
            specs.append(_describe_result(plan, feature, operation))
            inputs = plan_inputs(plan, feature)
        encoder = specs[-1].encoding
        columns.append(
            ColumnEncoding(feature.name, feature.column, dtype, encoder, operation, inputs)
        )
    return EncoderPlan(
        FeatureSchema(tuple(specs)), tuple(columns), tuple(vocabularies), tuple(tables)
    )


def _describe_plain(
    plan: FeaturePlan, feature: FeatureConfig, sizes: Mapping[str, int]
) -> FeatureSpec:
    dtype, vocabulary = plan.value_type(feature.column), feature.vocabulary
    is_vector = feature.length is not None and isinstance(feature.encoding, IdentityConfig)
    return FeatureSpec(
        name=feature.name,
        dtype="int64" if vocabulary else _WIRE_DTYPES[dtype],
        role=feature.role,
        shape=_raw_shape(plan, feature),
        max_len=feature.max_len,
        encoding=vocabulary or IDENTITY,
        vocabulary_size=sizes[vocabulary] if vocabulary else None,
        shared_embedding=vocabulary,
        pad_value=0 if vocabulary else 0.0 if is_vector and dtype.startswith("float") else None,
    )


def _describe_result(
    plan: FeaturePlan, feature: FeatureConfig, operation: Operation
) -> FeatureSpec:
    output = operation.output
    shape = _raw_shape(plan, feature) if output.shape is None else output.shape
    return FeatureSpec(
        name=feature.name,
        dtype=output.dtype,
        role=feature.role,
        shape=shape,
        max_len=feature.max_len if shape == (None,) else None,
        encoding=f"{operation.kind}:{feature.name}",
        vocabulary_size=output.vocabulary_size,
        shared_embedding=None if output.vocabulary_size is None else feature.name,
        pad_value=output.pad_value,
    )


def plan_inputs(plan: FeaturePlan, feature: FeatureConfig) -> tuple[RawColumn, ...]:
    """Returns the raw columns that the operation of a feature reads."""
    names = list(feature.columns)
    if isinstance(feature.encoding, BagWeightsConfig):
        names += plan.feature(feature.encoding.of).columns
    columns = [
        RawColumn(name, cast("RawDType", plan.value_type(name)), plan.is_list(name))
        for name in names
    ]
    if isinstance(feature.encoding, TargetConfig):
        columns.append(RawColumn(FOLD_COLUMN, "int64", is_served=False))
    return tuple(columns)


def _raw_shape(plan: FeaturePlan, feature: FeatureConfig) -> tuple[int | None, ...]:
    # A cross is a list where any of its fields is.
    crosses = isinstance(feature.encoding, CrossConfig)
    columns = feature.columns if crosses else (feature.column,)
    return (feature.length,) if any(plan.is_list(column) for column in columns) else ()
