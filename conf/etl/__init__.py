"""Config of `sluice build`: sources, joins, history, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.columns import ColumnConfig, PairConfig
from conf.etl.days import DaysConfig
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig, LabelConfig
from conf.etl.features import FeatureConfig, IdentityConfig, VocabularyConfig
from conf.etl.jdbc import JdbcConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, SourceConfig
from conf.etl.split import SplitConfig

__all__ = [
    "BadRowsConfig",
    "BuildConfig",
    "ColumnConfig",
    "DaysConfig",
    "EventsConfig",
    "FeatureConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JdbcConfig",
    "JoinConfig",
    "LabelConfig",
    "OutputConfig",
    "PairConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
]
