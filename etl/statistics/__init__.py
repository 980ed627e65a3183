"""Statistics of features: gathered per shard in the encoding pass, merged by the driver."""

from etl.statistics.accumulator import StatisticsAccumulator
from etl.statistics.labels import LabelFocus
from etl.statistics.merge import merge_statistics, summarize_statistics

__all__ = ["LabelFocus", "StatisticsAccumulator", "merge_statistics", "summarize_statistics"]
