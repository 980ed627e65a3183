"""Config of `sluice build`: sources, joins, history, label, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.columns import ColumnConfig, PairConfig
from conf.etl.contract import ContractConfig
from conf.etl.days import DaysConfig
from conf.etl.events import EventsConfig
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
from conf.etl.jdbc import JdbcConfig
from conf.etl.joins import AsOfConfig, JoinConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from conf.etl.negatives import NegativesConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, SourceConfig
from conf.etl.split import SplitConfig
from conf.etl.weights import DownSamplingConfig, WeightsConfig

__all__ = [
    "AsOfConfig",
    "BadRowsConfig",
    "BehaviourHistoryConfig",
    "BuildConfig",
    "ColumnConfig",
    "ContractConfig",
    "ConversionConfig",
    "DaysConfig",
    "DownSamplingConfig",
    "EventsConfig",
    "FeatureConfig",
    "GapsConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JdbcConfig",
    "JoinConfig",
    "LabelConfig",
    "NegativesConfig",
    "OutputConfig",
    "PairConfig",
    "RateConfig",
    "RollingConfig",
    "SessionsConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
    "WeightsConfig",
    "WhereConfig",
]
