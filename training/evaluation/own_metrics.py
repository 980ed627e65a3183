"""Metrics of the user, by their path: of a ranking model's tasks, or of a retrieval model's ranks.

A metric of a task is a number of all rows of a split, so that it need not be a mean over them: the
rows' labels, scores and weights are kept, 24 bytes a row and task. One of ranks is a value of each
row, whose mean is shown, so that slices, intervals and comparisons have it too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conf.errors import OwnCodeError
from conf.training.models import RankingConfig
from conf.training.train import OwnMetricConfig, TrainConfig
from training.evaluation.metrics import FloatArray, RankMeasures
from training.evaluation.scored_rows import ScoredRows
from training.networks.user_code import (
    call_function,
    import_function,
    pick_parameters,
    user_errors,
)

_TRIED_ROWS = 16
_LARGEST = 1e38
"""Curves hold float32, and means of larger numbers overflow."""
_log = logging.getLogger("sluice.evaluation")


class OwnMetric:
    """A function from labels, scores and weights to a number; it is tried on drawn rows."""

    def __init__(self, name: str, config: OwnMetricConfig) -> None:
        self.name, self._path, self._params = name, config.function, dict(config.params)
        self._function = import_function("metric", config.function)
        rng, labels = np.random.default_rng(0), np.arange(_TRIED_ROWS, dtype=np.float64) % 2
        self.compute(labels, rng.random(_TRIED_ROWS), np.ones(_TRIED_ROWS))

    def compute(self, labels: FloatArray, scores: FloatArray, weights: FloatArray) -> float | None:
        """The metric of `[rows]`; None: it is not defined on them, or no finite number.

        Scores are probabilities of label 1, or values of the label; weights are above 0.
        """
        # A metric that sorts in place would change what the next one is given.
        labels, scores, weights = (_view_read_only(c) for c in (labels, scores, weights))
        given = pick_parameters(self._function, {"weights": weights})
        fault = f"metric {self._path} fails on {len(labels)} rows"
        value = call_function(fault, self._function, labels, scores, **self._params, **given)
        with user_errors(fault, "return a number of all rows, or None where it is not defined"):
            number = math.nan if value is None else float(value)
        return number if abs(number) <= _LARGEST else None


def _view_read_only(column: FloatArray) -> FloatArray:
    """Returns a view that cannot be made writable: what it is a view of is not either."""
    column.setflags(write=False)
    return column[:]


class OwnRankMetric:
    """A function from ranks and a cut-off to a value of each row; tried on drawn ranks at `ks`.

    Called with `[rows, relevant]`, ranks from 1 (`inf` miss, `nan` padding), it returns `[rows]`.
    """

    def __init__(self, config: OwnMetricConfig, ks: Sequence[int]) -> None:
        self._path, self._params = config.function, dict(config.params)
        self._function = import_function("metric", config.function)
        for k in ks:
            self._try(k)

    def __call__(self, ranks: FloatArray, k: int) -> FloatArray:
        fault = f"metric {self._path} fails on {len(ranks)} rows at k={k}"
        # A copy: what it is a view of could be made writable.
        given = _view_read_only(np.array(ranks, np.float64))
        found = call_function(fault, self._function, given, k, **self._params)
        with user_errors(fault, "return a number for each row, shape [rows]: their mean is shown"):
            # A copy: it may give one buffer again and again.
            values = np.array(found, np.float64).reshape(len(ranks))
        self._require(np.abs(values) <= _LARGEST, values, "that is not finite, or too large", k)
        return values

    def _try(self, k: int) -> None:
        """Refuses a value of a row that changes beside other rows: a call has some of them."""
        ranks = np.arange(1.0, _TRIED_ROWS + 1)[:, np.newaxis] + np.array([0, 3, 9, 2 * k])
        ranks[:4, 0] = (1.0, np.inf, k, k + 1.0)
        ranks[: _TRIED_ROWS // 2, 1:] = np.nan
        values = self(ranks, k)
        for rows in (_TRIED_ROWS // 2, 1):  # Without padding, and alone.
            is_same = np.isclose(self(ranks[:rows, :1], k), values[:rows], rtol=1e-9)
            self._require(is_same, values, "and another one beside other rows or padding", k)

    def _require(self, good: NDArray[np.bool_], values: FloatArray, what: str, k: int) -> None:
        if not good.all():
            raise OwnCodeError(
                f"metric {self._path} gives a row a value {what}",
                received=f"{values[int(good.argmin())]:g} at k={k}",
                fix="give a finite number of each row's own ranks, by reducing over axis 1 alone; "
                "inf is an item that is not ranked, nan is padding and in no comparison true",
            )


def build_measures(config: TrainConfig) -> RankMeasures:
    """What is measured of ranked rows; lists of a ranking model have the cut-offs alone."""
    ks, metrics = config.evaluation.ks, config.evaluation.metrics
    if isinstance(config.model, RankingConfig):
        return RankMeasures(ks)
    return RankMeasures(ks, {name: OwnRankMetric(m, ks) for name, m in metrics.items()})


def build_own_metrics(config: TrainConfig) -> tuple[OwnMetric, ...]:
    """The metrics of a ranking model's tasks."""
    if not isinstance(config.model, RankingConfig):
        return ()
    return tuple(OwnMetric(name, own) for name, own in config.evaluation.metrics.items())


class OwnScores:
    """Labels and scores of a task's rows, and the metrics of the user of them."""

    def __init__(self, task: str, metrics: tuple[OwnMetric, ...]) -> None:
        self._task, self._metrics = task, metrics
        self._parts: list[tuple[FloatArray, ...]] = [(np.zeros(0),) * 3]

    def add(self, rows: ScoredRows, values: FloatArray) -> None:
        weights = np.ones(len(rows)) if rows.weights is None else rows.weights
        self._parts.append((rows.labels, values, weights))

    def result(self) -> dict[str, float | None]:
        """The metrics by name; one that is not defined on the rows is None, and told."""
        labels, scores, weights = (np.concatenate(c) for c in zip(*self._parts, strict=True))
        if not len(labels):
            return {metric.name: None for metric in self._metrics}
        values = {m.name: m.compute(labels, scores, weights) for m in self._metrics}
        for name in (name for name, value in values.items() if value is None):
            where = (name, self._task, f"{len(labels):,}")
            _log.warning("metric %s of task %s is not defined on these %s rows", *where)
        return values
