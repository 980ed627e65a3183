"""Embedding tables: first values of their rows, static ones, and dynamic ones with their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from conf.config_base import StrictFinite, default_tag
from conf.training.optimizer import SparseOptimizerConfig

MOST_ROWS = 1 << 40
"""More than any machine has memory for, and far from where 64 bits end."""
MOST_OCCURRENCES = (1 << 31) - 1
"""Counts of occurrences stop here."""


class NormalConfig(StrictFinite):
    """First values from a normal distribution of mean 0."""

    kind: Literal["normal"] = "normal"
    stddev: float = Field(0.05, gt=0, description="Standard deviation.")


class TruncatedNormalConfig(StrictFinite):
    """As `normal`, without what is more than two standard deviations from 0."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    stddev: float = Field(0.05, gt=0, description="Before it is truncated.")


class UniformConfig(StrictFinite):
    """First values that are equally likely in `[low, high)`."""

    kind: Literal["uniform"] = "uniform"
    low: float = Field(-0.05, description="Least value.")
    high: float = Field(0.05, description="Values stay below it.")

    @model_validator(mode="after")
    def _rising(self) -> UniformConfig:
        if self.low >= self.high:
            raise ValueError("`high` must be above `low`")
        return self


Initializer = NormalConfig | TruncatedNormalConfig | UniformConfig
InitializerConfig = Annotated[
    Initializer, Field(discriminator="kind"), default_tag("kind", "normal", alone=True)
]


class TableSettings(StrictFinite):
    """What tables of both kinds can be told."""

    dim: int | Literal["auto"] | None = Field(
        None,
        description="Length of a row; auto: 6 * floor(vocabulary ** 0.25); "
        "None: model.embedding_dim.",
    )
    initializer: InitializerConfig | None = Field(
        None, description="First values; None: normal, by model.embedding_stddev."
    )
    trainable: bool = Field(True, description="false: rows keep their first values.")
    l2: float | None = Field(
        None,
        gt=0,
        description="Weight of the squared norms of the rows that a batch looks up; None: "
        "model.embedding_l2.",
    )
    optimizer: SparseOptimizerConfig | None = Field(
        None, description="Optimizer and rate of its rows; None: optimizer.sparse."
    )

    @field_validator("dim")
    @classmethod
    def _positive(cls, dim: int | str | None) -> int | str | None:
        if isinstance(dim, int) and dim < 1:
            raise ValueError("it must be 1 or more, or auto")
        return dim

    @model_validator(mode="after")
    def _frozen_rows_stay(self) -> Self:
        for name in ("l2", "optimizer"):
            if not self.trainable and getattr(self, name) is not None:
                raise ValueError(f"`{name}` changes rows, and `trainable: false` keeps them")
        return self


class StaticTableConfig(TableSettings):
    """A row for each id of a vocabulary, from the start on."""

    kind: Literal["static"] = "static"
    dense: bool = Field(
        False,
        description="All rows are updated in each step, as dense weights are, and `l2` is that of "
        "the whole table; for small tables.",
    )

    @model_validator(mode="after")
    def _frozen_rows_are_not_updated(self) -> Self:
        if self.dense and not self.trainable:
            raise ValueError("`dense` updates all rows, and `trainable: false` none")
        return self


class AdmissionConfig(StrictFinite):
    """When a key gets a row; until then it reads zeros and is not trained. One of the three."""

    count: int | None = Field(
        None,
        ge=1,
        le=MOST_OCCURRENCES,
        description="With the n-th occurrence in training; 1: with any.",
    )
    coefficient: int = Field(
        1, ge=1, le=MOST_OCCURRENCES, description="What an occurrence counts for, towards `count`."
    )
    probability: float | None = Field(
        None, gt=0, lt=1, description="Drawn at each occurrence, by seed and key."
    )
    allow_list: str | None = Field(
        None, min_length=1, description="File of the keys that get one, a number on each line."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> AdmissionConfig:
        if sum(value is not None for value in (self.count, self.probability, self.allow_list)) != 1:
            raise ValueError("set one of `count`, `probability` and `allow_list`")
        if self.coefficient > 1 and self.count is None:
            raise ValueError("`coefficient` is of `count`: set it, or leave `coefficient` out")
        return self

    @property
    def least_occurrences(self) -> int:
        """Occurrences that a key needs for a row, where they are counted."""
        return -(-(self.count or 1) // self.coefficient)


class EvictionConfig(StrictFinite):
    """When a key is forgotten: its row, optimizer state and count. Each rule suffices alone."""

    timestamp: str | None = Field(
        None,
        min_length=1,
        description="Feature that holds a row's time, a whole number; None: time is steps.",
    )
    unused_time: int | None = Field(
        None,
        ge=1,
        description="Not seen for so long, in units of `timestamp`; now is its largest value yet.",
    )
    min_count: int | None = Field(
        None, ge=2, le=MOST_OCCURRENCES, description="Seen less often than this, in all."
    )
    every: int | Literal["epoch"] = Field(
        1000,
        description="Steps in which each key is looked at once, a part of them in each step; "
        "epoch: all with the epoch's last step.",
    )
    when_full: Literal["least_recent", "least_frequent"] | None = Field(
        None,
        description="Keys that make room where new ones find `max_rows` taken; None: new ones "
        "read zeros.",
    )

    @model_validator(mode="after")
    def _rules_fit(self) -> EvictionConfig:
        if not (self.unused_time or self.min_count or self.when_full):
            raise ValueError("set `unused_time`, `min_count` or `when_full`: no key is evicted")
        if self.unused_time is not None and self.timestamp is None:
            raise ValueError("`unused_time` needs `timestamp`, the feature that holds the time")
        if self.timestamp and not (self.unused_time or self.when_full == "least_recent"):
            raise ValueError("no rule uses `timestamp`: set `unused_time`, or leave it out")
        if isinstance(self.every, int) and self.every < 1:
            raise ValueError("`every` must be 1 or more, or epoch")
        return self


class DynamicTableConfig(TableSettings):
    """A row for each key that training meets, whatever its value; made when it is met."""

    kind: Literal["dynamic"] = "dynamic"
    features: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Features that share the table; None: those whose table has its name.",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        le=MOST_ROWS,
        description="Keys that get a row, at most; further ones read zeros.",
    )
    capacity: int = Field(
        65_536,
        ge=1,
        le=MOST_ROWS,
        description="Rows that memory is reserved for from the start.",
    )
    device_rows: int | None = Field(
        None,
        ge=1,
        le=1 << 30,
        description="Rows that the device holds, those that batches used last; all others are in "
        "host memory. None: it holds all.",
    )
    shard: Literal["workers"] | None = Field(
        None,
        description="workers: each process of devices.strategy=multi_worker holds a part of the "
        "rows and of their optimizer state. None: each process holds all.",
    )
    admission: AdmissionConfig | None = Field(
        None, description="Which keys get a row; None: all, when they are met."
    )
    eviction: EvictionConfig | None = Field(
        None, description="Which keys lose theirs; None: none does."
    )

    @model_validator(mode="after")
    def _is_full_at_some_time(self) -> DynamicTableConfig:
        if self.eviction and self.eviction.when_full and self.max_rows is None:
            raise ValueError("`eviction.when_full` needs `max_rows`: without it no table is full")
        return self

    @model_validator(mode="after")
    def _tiers_are_two(self) -> DynamicTableConfig:
        if self.device_rows and self.max_rows and self.device_rows >= self.max_rows:
            raise ValueError(
                f"`device_rows` ({self.device_rows}) must be below `max_rows` ({self.max_rows}), "
                "or be left out: the device would hold all rows"
            )
        return self

    @field_validator("dim")
    @classmethod
    def _needs_no_vocabulary(cls, dim: int | str | None) -> int | str | None:
        if dim == "auto":
            raise ValueError("auto needs the size of a vocabulary, and keys have none: a number")
        return dim


_OF_DYNAMIC = set(DynamicTableConfig.model_fields) - set(StaticTableConfig.model_fields)


def _find_table_kind(value: Any) -> Any:
    """Takes an entry that only sets what static tables have too for a static one.

    Raises:
        ValueError: A static table has a key of dynamic ones.
    """
    if not isinstance(value, Mapping):
        return value
    of_dynamic = sorted(_OF_DYNAMIC & set(value))
    if of_dynamic and value.get("kind") == "static":
        raise ValueError(
            f"`{of_dynamic[0]}` is a key of dynamic tables, and this one is static; set kind: "
            "dynamic, or leave it out"
        )
    if "kind" in value or of_dynamic:
        return value
    is_static = bool(set(StaticTableConfig.model_fields) & set(value))
    return {"kind": "static", **value} if is_static else value


TableConfig = Annotated[
    StaticTableConfig | DynamicTableConfig,
    Field(discriminator="kind"),
    default_tag("kind", "dynamic", alone=True),
    BeforeValidator(_find_table_kind),
]
EmbeddingsConfig = dict[Annotated[str, Field(min_length=1)], TableConfig]
"""Tables by name: a feature's, that of what features share, or a new one that names `features`."""
