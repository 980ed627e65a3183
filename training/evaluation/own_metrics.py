"""Metrics of one's own, by their path: of a ranking model's tasks, or of a retrieval model's ranks.

A metric of a task is a number of all rows of a split, so that it need not be a mean over them: the
rows' labels, scores and weights are kept, 24 bytes a row and task. One of ranks is a value of each
row, whose mean is shown, so that slices, intervals and comparisons have it too.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError
from conf.training.models import RankingConfig
from conf.training.train import OwnMetricConfig, TrainConfig
from training.evaluation.metrics import FloatArray, RankMeasures
from training.networks.own_code import (
    Fault,
    OwnCode,
    call_reported,
    import_function,
    own_errors,
    read_parameters,
)

_TRIED_ROWS, _SHOWN_RANKS = 16, 8
_LARGEST = 1e38
"""Curves hold float32, and means of larger numbers overflow."""
_OF_TASKS, _OF_RANKS = ("labels", "scores"), ("ranks", "k")
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
        code = OwnCode("metric", key, f"{key}.params", _OF_TASKS, ("weights",))
        self.name, self._path, self._code = name, config.function, code
        self._function = import_function(config.function, code)
        _refuse_other_kind(config.function, code, self._function)
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
    """Returns a number; None: it is not finite, or too large to be shown."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= _LARGEST else None


class OwnRankMetric:
    """A function of one's own, from ranks and a cut-off to a value of each row.

    Args:
        name: Its name in metrics.
        config: The function and its parameters.
        ks: The cut-offs that it is tried at.

    Raises:
        ConfigError: There is no such function, it takes other parameters, fails on ranks that are
            drawn, gives something else than a finite number for each row, or one that depends on
            other rows.
    """

    def __init__(self, name: str, config: OwnMetricConfig, ks: Sequence[int]) -> None:
        key = f"evaluation.metrics.{name}"
        code = OwnCode("metric", key, f"{key}.params", _OF_RANKS)
        self._path, self._params = config.function, dict(config.params)
        self._function = import_function(config.function, code)
        _refuse_other_kind(config.function, code, self._function)
        read_parameters(config.function, code, self._function, config.params)
        for k in ks:
            self._try(k)

    def __call__(self, ranks: FloatArray, k: int) -> FloatArray:
        """Returns the metric of each row, `[rows]`.

        Args:
            ranks: `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
            k: Cut-off.

        Raises:
            OwnCodeError: It fails, or gives something else than a finite number for each row.
        """
        with own_errors():
            return self._compute(ranks, k)

    def _try(self, k: int) -> None:
        ranks, single = _draw_ranks(k)
        values = self._compute(ranks, k)
        for rows in (single, 1):  # Beside others, padded, it is what it is alone.
            alone = self._compute(ranks[:rows, :1], k)
            differs = ~np.isclose(alone, values[:rows], rtol=1e-9)
            if differs.any():
                row = int(differs.argmax())
                raise ConfigError(
                    f"metric {self._path} gives a row another value beside other rows",
                    received=f"{values[row]:g} and, of {rows} rows without padding, "
                    f"{alone[row]:g}; {_show(ranks[row], k)}{self._place}",
                    allowed="a value of each row's own ranks, whatever pads them",
                    fix="reduce over axis 1 alone, and count relevant items by ~np.isnan(ranks)",
                )

    def _compute(self, ranks: FloatArray, k: int) -> FloatArray:
        fault = Fault(
            f"metric {self._path} fails on {len(ranks)} rows",
            allowed="NumPy's functions of ranks [rows, relevant] and a cut-off k",
            fix="correct the function",
        )
        # A copy: what it is a view of could be made writable.
        given = _view_read_only(np.array(ranks, np.float64))
        found = call_reported(fault, self._call, given, k)
        if found.shape != (len(ranks),) or found.dtype.kind not in "biuf":
            raise ConfigError(
                f"metric {self._path} gives something else than a number for each row",
                received=f"{found.dtype} of shape {found.shape}, of ranks of shape {ranks.shape}"
                f"{self._place}",
                allowed="numbers of shape [rows]: their mean is the metric",
                fix="reduce over relevant items alone: np.any(ranks <= k, axis=1)",
            )
        values = found.astype(np.float64)  # Also where it gives one buffer again and again.
        self._require_finite(values, ranks, k)
        return values

    def _call(self, ranks: FloatArray, k: int) -> NDArray[Any]:
        return np.asarray(self._function(ranks, k, **self._params))

    def _require_finite(self, values: FloatArray, ranks: FloatArray, k: int) -> None:
        bad = ~(np.abs(values) <= _LARGEST)  # Of NaN too.
        if bad.any():
            row = int(bad.argmax())
            raise ConfigError(
                f"metric {self._path} gives a row a value that is not finite or too large",
                received=f"{values[row]:g}; {_show(ranks[row], k)}{self._place}",
                allowed=f"a finite number for each row, from -{_LARGEST:g} to {_LARGEST:g}",
                fix="give a number, such as 0, where no relevant item is ranked; inf is an item "
                "that is not ranked, nan is padding and in no comparison true",
            )

    @property
    def _place(self) -> str:
        """Where the function begins, as ` in FILE:LINE`; empty where it does not tell."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return "" if code is None else f" in {code.co_filename}:{code.co_firstlineno}"


def _show(ranks: FloatArray, k: int) -> str:
    """Names a row by its first ranks, and the cut-off."""
    more = ", …" if len(ranks) > _SHOWN_RANKS else ""
    return f"ranks {', '.join(f'{rank:g}' for rank in ranks[:_SHOWN_RANKS])}{more}; k={k}"


def _draw_ranks(k: int) -> tuple[FloatArray, int]:
    """Draws ranks as rows have them: hits, misses, and what pads rows of fewer relevant items.

    Returns:
        `[rows, relevant]`, and how many of the first rows have one relevant item alone.
    """
    rng, relevant, single = np.random.default_rng(0), 4, _TRIED_ROWS // 2
    last = max(2 * k, relevant)
    ranks = np.stack([1.0 + rng.choice(last, relevant, replace=False) for _ in range(_TRIED_ROWS)])
    ranks[:single, 1:] = np.nan
    ranks[:4, 0] = (1.0, np.inf, k, k + 1.0)
    ranks[single] = np.arange(1.0, relevant + 1)
    ranks[single + 1] = np.inf
    ranks[single + 2, 1:] = (np.inf, np.nan, np.nan)
    return ranks, single


def _refuse_other_kind(path: str, code: OwnCode, function: Callable[..., Any]) -> None:
    """Refuses a function that is, by its arguments, of the other kind of models.

    Raises:
        ConfigError: It is.
    """
    try:
        names = tuple(inspect.signature(function).parameters)[:2]
    except (TypeError, ValueError):
        return  # `read_parameters` says so.
    wanted = code.arguments
    kinds: dict[tuple[str, ...], str] = {
        _OF_TASKS: "the tasks of ranking models",
        _OF_RANKS: "the ranks of retrieval models",
    }
    if names not in kinds or names == wanted:
        return
    raise ConfigError(
        f"metric {path} is of {kinds[names]}, and this model has none",
        received=f"a function of ({', '.join(names)})",
        allowed=f"a function of ({', '.join(wanted)}), of {kinds[wanted]}",
        fix=f"write one of ({', '.join(wanted)}), or leave {code.key} out",
    )


def check_own_metrics(config: TrainConfig) -> None:
    """Tries the metrics of one's own of a config on rows that are drawn.

    Raises:
        ConfigError: One does not work, or is of the other kind of models.
    """
    if isinstance(config.model, RankingConfig):
        build_own_metrics(config.evaluation.metrics)
    else:
        build_measures(config)


def build_measures(config: TrainConfig) -> RankMeasures:
    """Returns what is measured of ranked rows, each metric of one's own tried on drawn ranks.

    Lists of a ranking model have the cut-offs alone: its metrics of one's own are of tasks.

    Raises:
        ConfigError: As of `OwnRankMetric`.
    """
    evaluation = config.evaluation
    if isinstance(config.model, RankingConfig):
        return RankMeasures(evaluation.ks)
    own = {n: OwnRankMetric(n, m, evaluation.ks) for n, m in evaluation.metrics.items()}
    return RankMeasures(evaluation.ks, own)


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
