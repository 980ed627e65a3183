"""Which record goes into which shard, and in which order."""

from etl.arrangement.arrange import arrange
from etl.arrangement.keys import add_keys, check_partition_columns
from etl.arrangement.plan import ShardCell, ShardPlan, fixed_plan
from etl.arrangement.survey import needs_survey, plan_by_survey

__all__ = [
    "ShardCell",
    "ShardPlan",
    "add_keys",
    "arrange",
    "check_partition_columns",
    "fixed_plan",
    "needs_survey",
    "plan_by_survey",
]
