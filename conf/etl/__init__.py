"""Config of `sluice build`: sources, joins, history, label, split, features, output."""

from conf.etl.base import Strict
from conf.etl.build import BuildConfig
from conf.etl.columns import ColumnConfig, PairConfig
from conf.etl.contract import ContractConfig
from conf.etl.days import DaysConfig
from conf.etl.encodings import (
    BagWeightsConfig,
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
)
from conf.etl.events import EventsConfig
from conf.etl.features import FeatureConfig
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
    "BagWeightsConfig",
    "BehaviourHistoryConfig",
    "BucketizeConfig",
    "BuildConfig",
    "ColumnConfig",
    "ContractConfig",
    "ConversionConfig",
    "CountConfig",
    "CrossConfig",
    "CyclicalConfig",
    "DatePartConfig",
    "DaysConfig",
    "DownSamplingConfig",
    "EncodingConfig",
    "EventsConfig",
    "FeatureConfig",
    "GapsConfig",
    "HashConfig",
    "HashKeyConfig",
    "HistoryConfig",
    "IdentityConfig",
    "JdbcConfig",
    "JoinConfig",
    "LabelConfig",
    "MultiHotConfig",
    "NegativesConfig",
    "NgramsConfig",
    "NormalizeConfig",
    "OutputConfig",
    "PairConfig",
    "QuantileConfig",
    "RateConfig",
    "RollingConfig",
    "SessionsConfig",
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
    "WhereConfig",
]
