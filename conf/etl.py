"""Config of `sluice build`: sources, joins, history, split, features, output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from conf.references import check_references
from conf.schema import Role

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
"""Name of a source, column or feature: plain, since it becomes a path, a key or an identifier."""


class Strict(BaseModel):
    """Base of all configs: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ColumnConfig(Strict):
    """One declared column of a source.

    A value that does not parse as its type, is null although `nullable` is false, or lies
    outside `minimum`/`maximum`/`one_of` makes the row a bad row.
    """

    name: Name
    type: Literal["int64", "float32", "string", "list<int64>", "list<string>"]
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    one_of: tuple[str, ...] | None = None
    separator: str | None = Field(None, description="Separator inside a list column.")

    @model_validator(mode="after")
    def _list_has_separator(self) -> ColumnConfig:
        if self.type.startswith("list<") and not self.separator:
            raise ValueError(f"list column {self.name!r} needs a separator")
        bounded = self.minimum is not None or self.maximum is not None
        if bounded and self.type not in ("int64", "float32"):
            raise ValueError(f"column {self.name!r} of type {self.type} cannot have bounds")
        if self.one_of is not None and self.type.startswith("list<"):
            raise ValueError(f"list column {self.name!r} cannot have `one_of`")
        return self


class BadRowsConfig(Strict):
    """What happens to rows that do not fit the declared schema."""

    policy: Literal["fail", "quarantine", "drop"] = "quarantine"
    max_fraction: float = Field(0.01, ge=0, le=1, description="More bad rows stop the build.")


class SourceConfig(Strict):
    """One input: delimited text with a declared schema, or lines matched by a pattern."""

    path: str = Field(description="File, directory or glob; relative to `data_dir`.")
    format: Literal["delimited", "pattern"] = "delimited"
    separator: str = Field("\t", min_length=1)
    pattern: str | None = Field(
        None, description="Java regular expression with one group per column (format: pattern)."
    )
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    header: bool = Field(
        False, description="The first line of each file names its columns; it is not a row."
    )
    columns: tuple[ColumnConfig, ...] = Field(min_length=1)
    key: str | None = Field(None, description="Unique key of a dictionary; checked.")
    bad_rows: BadRowsConfig = BadRowsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        # Spark tells names apart by more than their case only if it is told to.
        names = [column.name.lower() for column in self.columns]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"columns declared twice: {', '.join(repeated)}")
        if self.key is not None and self.key not in self.column_types:
            raise ValueError(f"key column {self.key!r} is not declared")
        if (self.format == "pattern") != (self.pattern is not None):
            raise ValueError("`pattern` goes with `format: pattern`, and only with it")
        return self

    @property
    def column_types(self) -> dict[str, str]:
        """Declared type by column name."""
        return {column.name: column.type for column in self.columns}

    def column(self, name: str) -> ColumnConfig | None:
        """Returns a declared column, or None."""
        return next((column for column in self.columns if column.name == name), None)


class EventsConfig(Strict):
    """The behaviour log: who met what, when."""

    source: str
    user: str
    item: str
    time: str | None = Field(None, description="Time column; None: the file's order is the time.")
    time_unit: Literal["s", "ms"] = "s"
    deduplicate: bool = Field(
        True,
        description="Of equal (user, item, time) keep the first. Without a time column repeats "
        "cannot be told from duplicates, and all are kept.",
    )


class JoinConfig(Strict):
    """A dictionary joined to each event by key."""

    source: str
    column: str = Field(description="Column of the event that holds the dictionary's key.")
    unmatched: Literal["drop", "keep", "fail"] = "drop"


class HistoryConfig(Strict):
    """The user's items strictly before the event (ties in time: file order), latest first."""

    name: Name = "history"
    max_len: int = Field(50, ge=1)
    min_len: int | None = Field(None, ge=1, description="Samples with fewer are dropped.")

    @model_validator(mode="after")
    def _reachable(self) -> HistoryConfig:
        if self.min_len is not None and self.min_len > self.max_len:
            raise ValueError("`min_len` above `max_len` drops every sample")
        return self


class SplitConfig(Strict):
    """Which event goes into which split.

    `leave_one_out`: each user's last event is test, the last but one of `validation_users`
    users (chosen by a hash of their id; None: all) is validation, the rest train.
    `temporal`: events from `validation_from_ts`/`test_from_ts` (source's unit) on, or the last
    fractions in time where those are not given.
    `given`: `test_source` holds the test events, the log holds the others; validation as in
    leave_one_out, from the end of the log.
    """

    strategy: Literal["leave_one_out", "temporal", "given"] = "leave_one_out"
    validation: bool = True
    validation_users: int | None = Field(None, ge=1)
    min_events: int = Field(3, ge=2, description="Users with fewer events stay in train.")
    test_fraction: float = Field(0.1, gt=0, lt=1)
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    test_from_ts: int | None = None
    validation_from_ts: int | None = None
    test_source: str | None = None
    candidates: str | None = Field(None, description="Column of `test_source`: items to rank.")

    @model_validator(mode="after")
    def _given_has_source(self) -> SplitConfig:
        if (self.strategy == "given") != (self.test_source is not None):
            raise ValueError("`test_source` goes with `strategy: given`, and only with it")
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError("`test_fraction` and `validation_fraction` leave nothing to train on")
        return self


class LabelConfig(Strict):
    """A binary label from a numeric column of the event."""

    column: str
    at_least: float
    name: Name = "label"


class VocabularyConfig(Strict):
    """A vocabulary fitted on the train split: 0 pad, 1 OOV, then by falling frequency."""

    kind: Literal["vocabulary"] = "vocabulary"
    name: Name | None = Field(None, description="Vocabulary to share; None: one of its own.")
    min_count: int = Field(1, ge=1)
    max_size: int | None = Field(None, ge=1, description="Most frequent tokens kept.")


class IdentityConfig(Strict):
    """The value as it is, cast to the feature's type."""

    kind: Literal["identity"] = "identity"


EncodingConfig = Annotated[VocabularyConfig | IdentityConfig, Field(discriminator="kind")]


class FeatureConfig(Strict):
    """One feature of the record: which column, which side of the model, which encoding."""

    name: Name
    column: str
    role: Role
    encoding: EncodingConfig = VocabularyConfig()
    max_len: int | None = Field(None, ge=1, description="List features: values kept.")


class OutputConfig(Strict):
    """Where and how the shards are written."""

    root: str = "work/datasets"
    shards: int = Field(8, ge=1, description="Shards of the train split.")
    eval_shards: int = Field(2, ge=1, description="Shards of each other split.")
    compression: Literal["gzip"] | None = None
    writer: Literal["native", "connector"] = Field(
        "native",
        description="`connector`: the shards are written by the JVM connector spark-tfrecord, "
        "which `spark.conf` must bring to the class path.",
    )
    seed: int = Field(0, description="Salt of the content hash that orders the records.")


class SparkConfig(Strict):
    """The Spark session, where the job starts one itself."""

    master: str = "local[*]"
    driver_memory: str = "2g"
    shuffle_partitions: int = Field(8, ge=1)
    conf: dict[str, str] = {}


class BuildConfig(Strict):
    """Everything that `sluice build` needs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    data_dir: str = "."
    sources: dict[Name, SourceConfig]
    events: EventsConfig
    joins: tuple[JoinConfig, ...] = ()
    history: HistoryConfig | None = HistoryConfig()
    seen: bool = Field(True, description="Carry the user's earlier items in evaluation splits.")
    label: LabelConfig | None = None
    split: SplitConfig = SplitConfig()
    features: tuple[FeatureConfig, ...] = Field(min_length=1)
    output: OutputConfig = OutputConfig()
    spark: SparkConfig = SparkConfig()

    @model_validator(mode="after")
    def _references(self) -> BuildConfig:
        check_references(self)
        return self

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
