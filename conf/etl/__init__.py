"""Config of `sluice build`: sources, joins, history, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig, LabelConfig
from conf.etl.features import FeatureConfig, IdentityConfig, VocabularyConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, ColumnConfig, SourceConfig
from conf.etl.split import SplitConfig

__all__ = [
    "BadRowsConfig",
    "BuildConfig",
    "ColumnConfig",
    "ContractConfig",
    "EventsConfig",
    "FeatureConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JoinConfig",
    "LabelConfig",
    "OutputConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
]
