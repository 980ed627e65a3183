"""The whole config of `sluice build`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict
from conf.etl.contract import ContractConfig
from conf.etl.contract_references import check_contract_references
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig, LabelConfig
from conf.etl.features import FeatureConfig
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
    seen: bool = Field(True, description="Carry the user's earlier items in evaluation splits.")
    label: LabelConfig | None = None
    split: SplitConfig = SplitConfig()
    features: tuple[FeatureConfig, ...] = Field(min_length=1)
    contract: ContractConfig = ContractConfig()
    output: OutputConfig = OutputConfig()
    spark: SparkConfig = SparkConfig()

    @model_validator(mode="after")
    def _references(self) -> BuildConfig:
        check_references(self)
        check_contract_references(self)
        return self

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
