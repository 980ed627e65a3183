"""Arrow columns of any type to columns that the wire can carry, by policies; numpy and pyarrow."""

from etl.tfrecord.lowering.description import read_description
from etl.tfrecord.lowering.packing import PACKED_PREFIX, Slot
from etl.tfrecord.lowering.plan import Lowering, plan_lowering

__all__ = ["PACKED_PREFIX", "Lowering", "Slot", "plan_lowering", "read_description"]
