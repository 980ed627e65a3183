"""Metrics of one's own of a ranking model's tasks, by their path.

A metric is a number of all rows of a split, so that it need not be a mean over them: the rows'
labels, scores and weights are kept, 24 bytes a row and task.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError
from conf.training.train import OwnMetricConfig
from training.networks.own_code import (
    Fault,
    OwnCode,
    call_reported,
    import_function,
    own_errors,
    read_parameters,
)

_TRIED_ROWS = 16
_log = logging.getLogger("sluice.evaluation")


class OwnMetric:
    """A function of one's own, from labels and scores to a number.

    Args:
        name: Its name in metrics.
        config: The function and its parameters.

    Raises:
        ConfigError: There is no such function, it takes other parameters, fails on rows that are
            drawn, or gives something else than a number or None.
    """

    def __init__(self, name: str, config: OwnMetricConfig) -> None:
        key = f"evaluation.metrics.{name}"
        code = OwnCode("metric", key, f"{key}.params", ("labels", "scores"), ("weights",))
        self.name, self._path, self._code = name, config.function, code
        self._function = import_function(config.function, code)
        parameters = read_parameters(config.function, code, self._function, config.params)
        self._params, self._reads_weights = dict(config.params), "weights" in parameters
        rng = np.random.default_rng(0)
        labels = (np.arange(_TRIED_ROWS) % 2).astype(np.float64)
        self.compute(labels, rng.random(_TRIED_ROWS), np.ones(_TRIED_ROWS))

    def compute(
        self,
        labels: NDArray[np.float64],
        scores: NDArray[np.float64],
        weights: NDArray[np.float64],
    ) -> float | None:
        """Returns the metric of some rows; None: it is not defined on them.

        Args:
            labels: `[rows]`.
            scores: `[rows]`: probabilities of label 1, or values of the label.
            weights: `[rows]`, above 0; 1 where rows have none.

        Raises:
            ConfigError: It fails, or gives something else than a number or None.
        """
        # A metric that sorts in place would change what the next one is given.
        labels, scores, weights = (_view_read_only(c) for c in (labels, scores, weights))
        given = {"weights": weights} if self._reads_weights else {}
        fault = Fault(
            f"metric {self._path} fails on {len(labels)} rows",
            allowed="NumPy's functions of labels and scores, [rows] each",
            fix="correct the function; return None where it is not defined",
        )
        value = call_reported(fault, self._function, labels, scores, **self._params, **given)
        if value is None:
            return None
        if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
            raise ConfigError(
                f"metric {self._path} gives something else than a number",
                received=f"{type(value).__name__} of shape {np.shape(value)}",
                allowed="a number of all rows, or None where it is not defined",
                fix="reduce it over rows: np.average(values, weights=weights)",
            )
        return _read_finite(value)


def _view_read_only(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns a view that cannot be made writable: what it is a view of is not either."""
    column.setflags(write=False)
    return column[:]


def _read_finite(value: Any) -> float | None:
    """Returns a number; None: it is not finite, or an integer above all floats."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def build_own_metrics(configs: Mapping[str, OwnMetricConfig]) -> tuple[OwnMetric, ...]:
    """Builds the metrics of a config, each tried on rows that are drawn.

    Raises:
        ConfigError: As of `OwnMetric`.
    """
    return tuple(OwnMetric(name, config) for name, config in configs.items())


class OwnScores:
    """Labels and scores of a task's rows, and the metrics of one's own of them.

    Args:
        task: Name of the task, for messages.
        metrics: The metrics.
    """

    def __init__(self, task: str, metrics: tuple[OwnMetric, ...]) -> None:
        self._task, self._metrics = task, metrics
        self._parts: list[tuple[NDArray[np.float64], ...]] = []

    def update(
        self,
        labels: NDArray[Any],
        scores: NDArray[np.floating],
        weights: NDArray[np.float64] | None,
    ) -> None:
        """Adds rows, `[rows]` each; those of weight 0 are left out."""
        each = np.ones(len(labels)) if weights is None else weights
        kept = each > 0.0
        columns = (labels, scores, each)
        self._parts.append(tuple(np.asarray(c, np.float64)[kept] for c in columns))

    def result(self) -> dict[str, float | None]:
        """Returns the metrics by name; one that is not defined on the rows is None, and told."""
        if not sum(len(part[0]) for part in self._parts):
            return {metric.name: None for metric in self._metrics}
        labels, scores, weights = (np.concatenate(c) for c in zip(*self._parts, strict=True))
        values = {}
        for metric in self._metrics:
            with own_errors():
                values[metric.name] = metric.compute(labels, scores, weights)
            if values[metric.name] is None:
                _log.warning(
                    "metric %s of task %s is not defined on these %s rows",
                    metric.name, self._task, f"{len(labels):,}",
                )  # fmt: skip
        return values
