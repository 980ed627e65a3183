"""Config of `sluice build`: sources, joins, history, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.encodings import (
    BucketizeConfig,
    CountConfig,
    CrossConfig,
    CyclicalConfig,
    DatePartConfig,
    EncodingConfig,
    HashConfig,
    HashKeyConfig,
    IdentityConfig,
    MultiHotConfig,
    NgramsConfig,
    NormalizeConfig,
    QuantileConfig,
    SparseIndicesConfig,
    TargetConfig,
    TokensConfig,
    TopPerGroupConfig,
    VocabularyConfig,
    WeightsConfig,
)
from conf.etl.events import EventsConfig, HistoryConfig, JoinConfig, LabelConfig
from conf.etl.features import FeatureConfig
from conf.etl.output import OutputConfig, SparkConfig
from conf.etl.sources import BadRowsConfig, ColumnConfig, SourceConfig
from conf.etl.split import SplitConfig

__all__ = [
    "BadRowsConfig",
    "BucketizeConfig",
    "BuildConfig",
    "ColumnConfig",
    "CountConfig",
    "CrossConfig",
    "CyclicalConfig",
    "DatePartConfig",
    "EncodingConfig",
    "EventsConfig",
    "FeatureConfig",
    "HashConfig",
    "HashKeyConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JoinConfig",
    "LabelConfig",
    "MultiHotConfig",
    "NgramsConfig",
    "NormalizeConfig",
    "OutputConfig",
    "QuantileConfig",
    "SourceConfig",
    "SparkConfig",
    "SparseIndicesConfig",
    "SplitConfig",
    "Strict",
    "TargetConfig",
    "TokensConfig",
    "TopPerGroupConfig",
    "VocabularyConfig",
    "WeightsConfig",
]
