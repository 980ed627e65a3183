"""Config of `sluice build`: sources, joins, history, label, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.columns import ColumnConfig, PairConfig
from conf.etl.days import DaysConfig
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig
from conf.etl.features import FeatureConfig, IdentityConfig, VocabularyConfig
from conf.etl.jdbc import JdbcConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from conf.etl.negatives import NegativesConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, SourceConfig
from conf.etl.split import SplitConfig
from conf.etl.weights import DownSamplingConfig, WeightsConfig

__all__ = [
    "BadRowsConfig",
    "BuildConfig",
    "ColumnConfig",
    "ConversionConfig",
    "DaysConfig",
    "DownSamplingConfig",
    "EventsConfig",
    "FeatureConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JdbcConfig",
    "JoinConfig",
    "LabelConfig",
    "NegativesConfig",
    "OutputConfig",
    "PairConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
    "WeightsConfig",
]
