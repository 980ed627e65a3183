"""The fit of encoders on the train split, and the plan that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
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
from conf.encoders.declaration import Operation, OperationOutput
from conf.encoders.hashing import Cross
from conf.encoders.numbers import Bucketize, Normalize
from conf.encoders.target import FOLD_COLUMN, Statistic
from conf.errors import ConfigError, InputDataError
from conf.etl.encodings import (
    BagWeightsConfig,
    CountConfig,
    CrossConfig,
    FeatureConfig,
    LengthConfig,
    MultiHotConfig,
    NormalizeConfig,
    QuantileConfig,
    SparseIndicesConfig,
    StatisticConfig,
    TargetConfig,
)
from conf.schema import OOV_ID, DType, FeatureSchema, FeatureSpec
from conf.storage.table_files import read_parquet
from etl.encoders.feature_plan import FeaturePlan
from etl.encoders.joined_vocabulary import read_tokens
from etl.encoders.number_fit import (
    FittedNumbers,
    NumberRequest,
    add_folds,
    fit_numbers,
    fit_target,
)
from etl.encoders.vocabulary import load_vocabulary, read_statistic_table, write_statistic_table
from etl.events.sampling import before_sampling
from etl.events.splits import is_inside

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.dates import DateRange

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
    """What operations are fitted on, beside the numbers of the train split."""

    train: TrainSplit
    vocabularies: Mapping[Any, VocabularySpec]  # by name
    directory: Path  # of the vocabularies, where tables of statistics go
    earlier: EarlierEncoders | None
    tables: list[TableSpec] = field(default_factory=list)  # that were written


def fit_operations(
    train: TrainSplit,
    plan: FeaturePlan,
    vocabularies: Sequence[VocabularySpec],
    directory: Path,
    earlier: EarlierEncoders | None = None,
) -> tuple[dict[str, Operation], list[TableSpec]]:
    """Makes the operation of each feature that needs one, and the tables of statistics."""
    operations: dict[str, Operation] = {}
    requests: dict[str, list[NumberRequest]] = {}
    for feature in plan.features:
        kept = None if earlier is None else earlier.find_kept(feature.name)
        # A statistic is kept token by token: those that are new are fitted.
        is_kept = kept is not None and not isinstance(kept, Statistic)
        stated = kept if is_kept else feature.encoding.state()
        if stated is not None:
            operations[feature.name] = stated
        elif feature.encoding.operation is not None:
            requests[feature.name] = _request_numbers(feature, plan)
    numbers = fit_numbers(train.samples, chain.from_iterable(requests.values()), train.key)
    fit = OperationFit(train, {spec.name: spec for spec in vocabularies}, directory, earlier)
    for name, wanted in requests.items():
        feature, found = plan.feature(name), [numbers[request] for request in wanted]
        operations[name] = fit_operation(feature, found, fit)
    return operations, fit.tables


def _request_numbers(feature: FeatureConfig, plan: FeaturePlan) -> list[NumberRequest]:
    """The numbers of the train split that an encoding is fitted to."""
    config = feature.encoding
    requests: list[NumberRequest] = []
    for column in feature.columns:
        request = NumberRequest(column, plan.is_list(column))
        own = config.prepared.get(column) if isinstance(config, CrossConfig) else config
        match own:
            case NormalizeConfig():
                quartiles = (0.25, 0.5, 0.75) if own.method == "robust" else ()
                request = replace(request, prepare=own.preparation, probabilities=quartiles)
            case QuantileConfig():
                inner = tuple(i / own.buckets for i in range(1, own.buckets))
                request = replace(request, probabilities=inner)
            case SparseIndicesConfig():
                pass
            case _:
                continue
        requests.append(request)
    return requests


def fit_operation(
    feature: FeatureConfig, numbers: Sequence[FittedNumbers], fit: OperationFit
) -> Operation:
    """Makes the operation of a feature from the numbers of `_request_numbers`, in their order."""
    config = feature.encoding
    match config:
        case NormalizeConfig():
            return _scale(config, *numbers)
        case QuantileConfig():
            return _cut_equally(*numbers)
        case CrossConfig():
            return _cross(config, feature.columns, numbers)
        case SparseIndicesConfig():
            return _find_sizes(feature.name, numbers)
        case LengthConfig():
            return Length(feature.max_len)
        case MultiHotConfig():
            size = _check_size(feature.name, fit.vocabularies[feature.vocabulary])
            return MultiHot(str(feature.vocabulary), size, config.weights is not None)
        case StatisticConfig():
            return _fit_statistic(feature, fit)
    raise NotImplementedError(f"nothing fits {config.kind!r}")


def _scale(config: NormalizeConfig, fitted: FittedNumbers) -> Normalize:
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


def _cross(config: CrossConfig, columns: Sequence[str], numbers: Sequence[FittedNumbers]) -> Cross:
    if not config.prepared:
        return Cross(config.buckets)
    found = iter(numbers)
    made: list[Operation | None] = []
    for own in map(config.prepared.get, columns):
        if isinstance(own, QuantileConfig):
            made.append(_cut_equally(next(found)))
        else:
            made.append(None if own is None else own.state())
    return Cross(config.buckets, tuple(made))


def _find_sizes(name: str, numbers: Sequence[FittedNumbers]) -> SparseIndices:
    highest = [fitted.maximum for fitted in numbers]
    if not 0 <= min(highest) <= max(highest) < _MAX_INDICES:
        raise InputDataError(
            f"feature {name!r} has no index space: its highest indices are out of range",
            received=", ".join(f"{index:.0f}" for index in highest),
            fix="declare `sizes`, or clean the column",
        )
    return SparseIndices(tuple(int(index) + 1 for index in highest))


def _check_size(name: str, vocabulary: VocabularySpec) -> int:
    if vocabulary.size > _MAX_MULTI_HOT:
        raise ConfigError(
            f"feature {name!r} would be a vector of {vocabulary.size:,} numbers per row",
            allowed=f"at most {_MAX_MULTI_HOT:,}",
            fix="set `max_size`, or encode it by `vocabulary`, which keeps a list of ids",
        )
    return vocabulary.size


def _fit_statistic(feature: FeatureConfig, fit: OperationFit) -> Statistic:
    """Writes a statistic per token; tokens of an earlier version may keep theirs."""
    spec = fit.vocabularies[feature.vocabulary]
    values = _find_known(feature, spec, fit)
    if (unknown := np.isnan(values)).any():
        values = np.where(unknown, _compute_statistic(feature, spec, fit), values)
    path = fit.directory / f"{feature.name}.table.parquet"
    fit.tables.append(write_statistic_table(values, path))
    return Statistic(spec.name, feature.name)


def _compute_statistic(
    feature: FeatureConfig, spec: VocabularySpec, fit: OperationFit
) -> np.ndarray:
    if isinstance(feature.encoding, CountConfig):
        # The vocabulary has counted its tokens already.
        counts = read_parquet(fit.directory / spec.file, ["count"])["count"].to_numpy()
        counts = np.concatenate([np.zeros(spec.first_token_id), counts])[:, None]
        return np.log1p(counts) if feature.encoding.log1p else counts
    rows = add_folds(fit.train.samples, fit.train.key)
    tokens = read_tokens(rows.sparkSession, fit.directory, spec)
    return fit_target(rows, tokens, spec, feature.column, cast(str, fit.train.label))


def _find_known(feature: FeatureConfig, spec: VocabularySpec, fit: OperationFit) -> np.ndarray:
    """The earlier statistics of tokens, NaN of those that had none: a row for each id."""
    kept = None if fit.earlier is None else fit.earlier.find_kept(feature.name)
    if fit.earlier is None or not isinstance(kept, Statistic):
        return np.full((spec.size, 1), np.nan)
    plan, directory = fit.earlier.plan, fit.earlier.directory
    known_spec = plan.vocabulary(kept.vocabulary)
    [table] = [table for table in plan.tables if table.name == kept.table]
    values = read_statistic_table(directory, table).astype(np.float64)
    known = load_vocabulary(directory, known_spec)["token"].combine_chunks()
    tokens = load_vocabulary(fit.directory, spec)["token"]
    places = pc.index_in(tokens, value_set=known).fill_null(-1).to_numpy().astype(np.int64)
    # What is no token (padding, unknown and its buckets) has the same value in each row.
    rows = np.full(spec.size, OOV_ID)
    rows[spec.first_token_id :] = np.where(places < 0, -1, places + known_spec.first_token_id)
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
        spec = _describe(plan, feature, operation, sizes)
        inputs = () if operation is None else plan_inputs(plan, feature)
        dtype = cast("RawDType", plan.value_type(feature.column))
        specs.append(spec)
        columns.append(
            ColumnEncoding(feature.name, feature.column, dtype, spec.encoding, operation, inputs)
        )
    return EncoderPlan(
        FeatureSchema(tuple(specs)), tuple(columns), tuple(vocabularies), tuple(tables)
    )


def _describe(
    plan: FeaturePlan,
    feature: FeatureConfig,
    operation: Operation | None,
    sizes: Mapping[str, int],
) -> FeatureSpec:
    table = feature.vocabulary
    pad: float | str | None
    if operation is not None:
        output, encoding = operation.output, f"{operation.kind}:{feature.name}"
        table = None if output.vocabulary_size is None else feature.name
        pad = output.pad_value
    elif table is not None:
        output, encoding, pad = OperationOutput("int64", sizes[table]), table, 0
    else:
        output, encoding = OperationOutput(_WIRE_DTYPES[plan.value_type(feature.column)]), IDENTITY
        pad = 0.0 if feature.length is not None and output.dtype == "float32" else None
    shape = _raw_shape(plan, feature) if output.shape is None else output.shape
    return FeatureSpec(
        name=feature.name,
        dtype=output.dtype,
        role=feature.role,
        shape=shape,
        max_len=feature.max_len if operation is None or shape == (None,) else None,
        encoding=encoding,
        vocabulary_size=output.vocabulary_size,
        shared_embedding=table,
        pad_value=pad,
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
