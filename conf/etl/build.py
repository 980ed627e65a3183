"""The whole config of `sluice build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from conf.config_base import Name, Strict
from conf.etl.contract import ContractConfig, check_contract_references
from conf.etl.encodings import FeatureConfig, find_counted_lists
from conf.etl.events import (
    EventsConfig,
    JoinConfig,
    MostFrequentConfig,
    UserHistoryConfig,
    WindowedFeatureConfig,
)
from conf.etl.labels import LabelConfig, NegativesConfig, WeightsConfig
from conf.etl.output import OutputConfig
from conf.etl.references import check_references, find_used_sources
from conf.etl.sources import SourceConfig
from conf.etl.spark_session import SparkSettings
from conf.etl.split import SplitConfig
from conf.etl.time_columns import (
    check_time_units,
    find_time_columns,
    settle_feature,
    settle_split,
)
from conf.splits import CATALOG, EVENT_SPLITS, USERS

LABEL = "label"
WEIGHT = "weight"


class BuildConfig(Strict):
    """Everything that `sluice build` needs."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="Name of the dataset: its folder below `output.root`.",
    )
    data_dir: str = Field(
        ".", description="Folder that relative paths of sources start from; `--data` sets it."
    )
    sources: dict[Name, SourceConfig] = Field(
        description="The inputs by name: the log, and the dictionaries that are joined to it."
    )
    events: EventsConfig
    joins: tuple[JoinConfig, ...] = ()
    histories: tuple[UserHistoryConfig, ...] = Field(
        (UserHistoryConfig(),),
        description="Lists of the user's items strictly before the event. None without users or "
        "items, and where the log brings its own, unless they are declared.",
    )
    session_gap_minutes: float | None = Field(
        None,
        gt=0,
        description="A longer pause of a user begins a new session: columns `session_id` (text, "
        "unique in the log) and `session_position` (from 1). The session so far is a history with "
        "`within_session`. None: there are none.",
    )
    rolling: tuple[WindowedFeatureConfig, ...] = ()
    most_frequent: tuple[MostFrequentConfig, ...] = ()
    seen: bool | Annotated[str, Field(min_length=1)] = Field(
        True,
        description="Carry the user's earlier items in evaluation splits: all, or those of the "
        "events that meet a condition in Spark's SQL, such as purchases.",
    )
    train_samples: Literal["all", "last"] | Annotated[int, Field(ge=2)] = Field(
        "all",
        description="Which events of the train split are samples. last: each user's last one, "
        "whose history is the sequence before it; a number: also every n-th before that one. For "
        "models that learn at every position; the others stay in histories and vocabularies.",
    )
    label: LabelConfig | Annotated[tuple[LabelConfig, ...], Field(min_length=1)] | None = Field(
        None,
        description="One label or, for several tasks, a list; weights, negatives and metrics go by "
        "the first.",
    )
    negatives: NegativesConfig | None = None
    down_sampling: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the train rows with label 0 that is kept; 1/share goes into the "
        "weight of those kept.",
    )
    weights: WeightsConfig | None = None
    split: SplitConfig = SplitConfig()
    features: tuple[FeatureConfig, ...] = Field(min_length=1)
    contract: ContractConfig = ContractConfig()
    output: OutputConfig = OutputConfig()
    spark: SparkSettings = Field(
        default_factory=dict,
        description="Settings of Spark by name (`spark.` in front may be left out): `master` "
        "(local[*] if left out; spark-submit's own), `driver.memory` (2g), "
        "`sql.shuffle.partitions` and any other. Sluice's own `sluice.vocabularyBytes` (256 MB): "
        "bytes of tokens (8 of a number, 4 and its own of a text) up to which each Python worker "
        "holds a vocabulary; those of a larger one become ids by a join in Spark.",
    )

    @field_validator("features", mode="before")
    @classmethod
    def _find_counted_lists(cls, features: Any) -> Any:
        return find_counted_lists(features)

    @field_validator("split")
    @classmethod
    def _settle_bounds(cls, split: SplitConfig, info: ValidationInfo) -> SplitConfig:
        return settle_split(split, info.data)

    @field_validator("features")
    @classmethod
    def _settle_dates(
        cls, features: tuple[FeatureConfig, ...], info: ValidationInfo
    ) -> tuple[FeatureConfig, ...]:
        return tuple(settle_feature(feature, info.data) for feature in features)

    @model_validator(mode="before")
    @classmethod
    def _rows_without_past(cls, data: Any) -> Any:
        """Histories and seen items are off by default where rows have no user or no item.

        So is the history where the log brings its own.
        """
        events = data.get("events") if isinstance(data, Mapping) else None
        if isinstance(events, EventsConfig):
            events = events.model_dump()
        if not isinstance(events, Mapping):
            return data
        if not (events.get("user") and events.get("item")):
            return {"histories": (), "seen": False, **data}
        return {"histories": (), **data} if events.get("history") else data

    @model_validator(mode="after")
    def _references(self) -> BuildConfig:
        check_references(self)
        check_contract_references(self)
        check_time_units(self)
        return self

    @property
    def used_sources(self) -> dict[str, SourceConfig]:
        """The sources that a build reads, by name, the event log first."""
        return {name: self.sources[name] for name in find_used_sources(self)}

    @property
    def all_labels(self) -> tuple[LabelConfig, ...]:
        """Every declared label, the one that weights and negatives go by first."""
        if self.label is None or isinstance(self.label, tuple):
            return self.label or ()
        return (self.label,)

    @property
    def first_label(self) -> LabelConfig | None:
        """The label that weights, negatives and metrics go by."""
        return next(iter(self.all_labels), None)

    @property
    def further_labels(self) -> tuple[LabelConfig, ...]:
        """The others."""
        return self.all_labels[1:]

    @property
    def label_name(self) -> str | None:
        """Column of the label; drawn negatives make one where the config declares none."""
        if self.first_label is not None:
            return self.first_label.name
        return LABEL if self.negatives is not None and self.negatives.draws else None

    @property
    def weight_name(self) -> str | None:
        """Column of the sample's weight, None where all weigh the same."""
        return WEIGHT if self.weights is not None or self.down_sampling is not None else None

    @property
    def seen_where(self) -> str | None:
        """Condition on the events whose items count as seen; None: all of them."""
        return self.seen if isinstance(self.seen, str) else None

    @property
    def numbers_events(self) -> bool:
        """Whether records hold the number of their event among its user's.

        Where a user has several records in a split, `seen` does not tell which is the first: it
        leaves items out, and an item that was taken again adds none.
        """
        split = self.split
        has_several = {
            "leave_one_out": False,
            "given": self.events.time is not None and split.candidates is None,
        }
        return bool(self.seen) and (
            self.seen_where is not None or has_several.get(split.strategy, True)
        )

    @property
    def record_splits(self) -> tuple[str, ...]:
        """The splits that are written: no item corpus without items, nor users without both.

        A log's rows that belong to no one have no latest state to serve.
        """
        events = self.events
        items = (CATALOG,) if events.item is not None else ()
        return (*EVENT_SPLITS, *items, *((USERS,) if events.has_user_histories else ()))

    @property
    def brought_history(self) -> tuple[str, ...]:
        """List columns of the log with the items before the event, and the list aligned to them."""
        if self.events.history is None:
            return ()
        column = self.sources[self.events.source].column(self.events.history)
        pair = column.pair if column is not None else None
        return (self.events.history, *((pair,) if pair is not None else ()))

    @property
    def event_column_types(self) -> dict[str, str]:
        """Type of each column of the events: the log's, and what the dictionaries add."""
        types = dict(self.sources[self.events.source].column_types)
        for join in self.joins:
            types.update(join.added_columns(self.sources[join.source]))
        return types

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values, with the unit of each whole number's times."""
        data = self.model_dump(mode="json")
        for time in find_time_columns(self):
            for column in data["sources"][time.source]["columns"]:
                if column["name"] == time.column and column["type"] != "timestamp":
                    column["unit"] = self.sources[time.source].time_unit(time.column)
        return data

    @property
    def event_ms(self) -> int:
        """Milliseconds of a unit of the events' time."""
        return self.sources[self.events.source].ms_per_unit(self.events.time or "")
