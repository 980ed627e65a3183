"""Config of `sluice build`: sources, joins, history, label, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig
from conf.etl.features import FeatureConfig, IdentityConfig, VocabularyConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from conf.etl.negatives import NegativesConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, ColumnConfig, SourceConfig
from conf.etl.split import SplitConfig
from conf.etl.weights import DownSamplingConfig, WeightsConfig

__all__ = [
    "BadRowsConfig",
    "BuildConfig",
    "ColumnConfig",
    "ConversionConfig",
    "DownSamplingConfig",
    "EventsConfig",
    "FeatureConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JoinConfig",
    "LabelConfig",
    "NegativesConfig",
    "OutputConfig",
    "SourceConfig",
    "SparkConfig",
    "SplitConfig",
    "Strict",
    "VocabularyConfig",
    "WeightsConfig",
]
