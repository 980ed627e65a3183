"""Raising: decoded features back to the columns of a wanted schema."""

from etl.tfrecord.raising.plan import Raising, plan_raising

__all__ = ["Raising", "plan_raising"]
