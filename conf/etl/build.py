"""The whole config of `sluice build`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict
from conf.etl.events import EventsConfig, LabelConfig
from conf.etl.features import FeatureConfig
from conf.etl.histories import (
    BehaviourHistoryConfig,
    HistoryConfig,
    RollingConfig,
    SessionsConfig,
)
from conf.etl.joins import JoinConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.references import check_references
from conf.etl.sources import SourceConfig
from conf.etl.split import SplitConfig


class BuildConfig(Strict):
    """Everything that `sluice build` needs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    data_dir: str = "."
    sources: dict[Name, SourceConfig]
    events: EventsConfig
    joins: tuple[JoinConfig, ...] = ()
    history: HistoryConfig | None = HistoryConfig()
    histories: tuple[BehaviourHistoryConfig, ...] = ()
    sessions: SessionsConfig | None = None
    rolling: tuple[RollingConfig, ...] = ()
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

    @property
    def event_column_types(self) -> dict[str, str]:
        """Type of each column of the events: the log's, and what the dictionaries add."""
        types = dict(self.sources[self.events.source].column_types)
        for join in self.joins:
            types.update(join.added_columns(self.sources[join.source]))
        return types

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
