"""What encoders are fitted on, and the fit of all operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from conf.encoders import EncoderPlan, TableSpec
from conf.encoders.target import Statistic
from conf.local_paths import local_path
from etl.encoders.base import fits, number_requests
from etl.encoders.number_fit import FittedNumbers, NumberRequest, fit_numbers
from etl.events.down_sampling import before_sampling
from etl.events.splits import is_inside
from etl.features.plan import FeaturePlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.dates import DateRange
    from conf.encoders.declaration import Operation
    from conf.etl.encodings import FeatureConfig


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

    def find_kept(self, feature: str) -> Operation | None:
        """Returns the operation of a feature whose fitted numbers are kept, or None."""
        return self.plan.column(feature).operation if feature in self.kept else None


@dataclass(frozen=True)
class OperationFit:
    """What operations are fitted on.

    Attributes:
        train: The train split.
        vocabularies: The fitted vocabularies, by name.
        numbers: What was asked of the columns of numbers, by the name that asked for it.
        directory: Where tables of statistics go.
        earlier: Encoders whose numbers may be kept; None: all are fitted.
        tables: The tables of statistics that were written.
    """

    train: TrainSplit
    vocabularies: Mapping[str, pa.Table]
    numbers: Mapping[str, FittedNumbers]
    directory: Path
    earlier: EarlierEncoders | None
    tables: list[TableSpec] = field(default_factory=list)

    def find_vocabulary(self, feature: FeatureConfig) -> tuple[str, pa.Table]:
        """Returns the vocabulary of a feature's tokens, by name."""
        name = feature.vocabulary or ""
        return name, self.vocabularies[name]


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
            request = number_requests.find(config)
            requests |= {} if request is None else request(feature, config, plan)
    numbers = fit_numbers(train.samples, requests, train.key)
    fit = OperationFit(train, vocabularies, numbers, directory, earlier)
    for feature in fitted:
        operations[feature.name] = fits[feature.encoding](feature, feature.encoding, fit)
    return operations, fit.tables
