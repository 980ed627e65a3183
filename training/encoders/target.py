"""Statistics per token on tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from conf.encoders.target import Statistic
from training.encoders.execution import RawValues, Resources, executions


@executions.declare(Statistic)
def _statistic(
    operation: Statistic, inputs: Sequence[RawValues], resources: Resources
) -> tf.Tensor:
    ids = resources.ids[operation.vocabulary](inputs[0])
    return tf.gather(resources.statistics[operation.table], ids)
