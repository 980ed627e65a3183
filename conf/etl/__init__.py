"""Config of `sluice build`: sources, joins, history, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.events import EventsConfig, LabelConfig
from conf.etl.features import FeatureConfig, IdentityConfig, VocabularyConfig
from conf.etl.histories import (
    BehaviourHistoryConfig,
    GapsConfig,
    HistoryConfig,
    RateConfig,
    RollingConfig,
    SessionsConfig,
    WhereConfig,
)
from conf.etl.joins import AsOfConfig, JoinConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, ColumnConfig, SourceConfig
from conf.etl.split import SplitConfig

__all__ = [
    "AsOfConfig",
    "BadRowsConfig",
    "BehaviourHistoryConfig",
    "BuildConfig",
    "ColumnConfig",
    "EventsConfig",
    "FeatureConfig",
    "GapsConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JoinConfig",
    "LabelConfig",
    "OutputConfig",
    "RateConfig",
    "RollingConfig",
    "SessionsConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
    "WhereConfig",
]
