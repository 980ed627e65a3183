"""Numbers and names of metrics as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from conf.metrics import LOSS_METRIC, METRICS, list_families
from conf.training.input import describe_conditions

MISSING = "\N{EN DASH}"
_LEAST_SHARE = 1e-5


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def plain_words(name: str) -> str:
    """Returns an identifier as words: `read_sources` -> `read sources`."""
    return name.replace("_", " ")


def reason_words(reason: str) -> str:
    """Returns a reason as words; the column after its colon keeps its underscores."""
    what, colon, column = reason.partition(":")
    return f"{plain_words(what)}: {column.strip()}" if colon else plain_words(what)


def utc(ts_ms: int, pattern: str) -> str:
    """Returns a time in milliseconds since 1970 as text, such as `%Y-%m-%d`."""
    try:
        return f"{datetime.fromtimestamp(ts_ms / 1000, UTC):{pattern}}"
    except (OverflowError, ValueError, OSError):
        return f"{ts_ms:,} ms"  # no date: times that count from elsewhere


def share_of(part: Any, whole: Any) -> float | None:
    """Returns a part as a share of the whole, at most 1; None where there is no such share."""
    numerator, denominator = to_float(part), to_float(whole)
    return None if numerator is None or not denominator else min(numerator / denominator, 1.0)


def to_float(value: Any) -> float | None:
    """Returns a finite number, None for anything else (None, NaN, text, a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _of_number(write: Callable[[float], str]) -> Callable[[Any], str]:
    """Makes a form of any value out of one of numbers: anything else is missing."""

    @wraps(write)
    def form(value: Any) -> str:
        number = to_float(value)
        return MISSING if number is None else write(number)

    return form


@_of_number
def format_count(number: float) -> str:
    """Returns a count with thousands separators: `1,000,209`."""
    return f"{number:,.0f}"


@_of_number
def format_bytes(number: float) -> str:
    """Returns a size in decimal units: `12.3 MB`."""
    if abs(number) < 999.5:
        return f"{number:,.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if abs(number) < 999.95:
            return f"{number:,.1f} {unit}"
    return f"{number / 1000:,.1f} TB"


@_of_number
def format_seconds(number: float) -> str:
    """Returns a duration: `84 ms`, `12.3 s`, `2 min 05 s`, `3 h 20 min`."""
    if number < 0.9995:
        return f"{number * 1000:.0f} ms"
    if number < 59.95:
        return f"{number:.1f} s"
    minutes, seconds = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@_of_number
def format_share(number: float) -> str:
    """Returns a share of one as a percentage; a share that is not quite 0 or 1 never reads so.

    Below 1 % it has three significant digits: rates of labels are often as small.
    """
    if 0 < number < _LEAST_SHARE:
        return f"<{_LEAST_SHARE:.3%}"
    if 0 < number < 0.01:
        return f"{number:.{-math.floor(math.log10(number))}%}"
    if 0.9995 <= number < 1:
        return ">99.9%"
    return f"{number:.0%}" if number in (0, 1) else f"{number:.1%}"


@_of_number
def format_metric(number: float) -> str:
    """Returns a quality metric with four decimals, as papers print it."""
    # Rounded first, so that a value near 0 does not read as -0.0000.
    return f"{round(number, 4) + 0.0:.4f}"


@_of_number
def format_number(number: float) -> str:
    """Returns any plain value: whole and large numbers in full, others with four digits."""
    if number == int(number) and abs(number) < 1e12:
        return f"{int(number):,}"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e12 else f"{number:.4g}"


def format_value(value: Any) -> str:
    """Returns a value of a config: numbers with four figures, nothing where there is none."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


_TASK_METRICS = tuple(
    name for name in list_families("binary", "value") if name not in ("expected_error", "mse")
)


def metric_title(metric: str, first_task: str | None = None) -> str:
    """Returns a metric's name as papers write it: `hit_rate@10` -> `HR@10`.

    That of a further task has the task in front: `like/auc` -> `like AUC`.

    Args:
        metric: Its name.
        first_task: Task of metrics whose name has none in front, where there are several tasks.
    """
    task, _, name = metric.rpartition("/")
    family, at, k = name.partition("@")
    if family != LOSS_METRIC:  # The loss is that of all tasks.
        task = task or first_task or ""
    title = METRICS[family].title if family in METRICS else family
    return f"{task} {title}{at}{k}".strip()


def first_of_several(tasks: Any) -> str | None:
    """Returns the first of several tasks, by name; None where there are no others."""
    names = list(as_mapping(tasks))
    return names[0] if len(names) > 1 else None


def read_task_metrics(values: Mapping[str, Any]) -> dict[str, tuple[float | None, float | None]]:
    """Returns the metrics of a ranking model's task by name: the model's and the constant's.

    Metrics that the task does not have are left out.
    """
    constant, found = as_mapping(values.get("constant")), {}
    for name in _TASK_METRICS:
        value = values.get(name)
        if isinstance(value, Mapping):
            value = value.get("ratio" if name == "calibration" else "value")
        elif name in ("gauc", "calibration"):
            continue  # Where there are no users, or no rows.
        if name in values:
            found[name] = (to_float(value), to_float(constant.get(name)))
    own = as_mapping(values.get("own"))
    return {**found, **{str(name): (to_float(value), None) for name, value in own.items()}}


def describe_filter(metrics: Mapping[str, Any]) -> str | None:
    """Returns which rows of a split `evaluation.filter` left; None where there is no filter."""
    found = as_mapping(metrics.get("filter"))
    conditions = found.get("conditions")
    if not isinstance(conditions, list) or not all(
        isinstance(item, Mapping) and {"feature", "op", "value"} <= item.keys()
        for item in conditions
    ):
        return None
    counts = f"{format_count(found.get('rows'))} of {format_count(found.get('of'))} rows"
    return f"evaluation.filter: {describe_conditions(conditions)}: {counts}"


def describe_not_relevant(metrics: Mapping[str, Any]) -> str | None:
    """Returns how many rows are no positives, which are not ranked; None where all are."""
    count = metrics.get("rows_not_relevant")
    return f"{count:,} rows are not relevant by label or weight: not ranked" if count else None


def describe_split(metrics: Mapping[str, Any]) -> str:
    """Returns the split that metrics are of, and which of its rows."""
    split, filtered = f"{metrics.get('split', 'test')} split", describe_filter(metrics)
    return split if filtered is None else f"{split} ({filtered})"


def describe_weights(values: Mapping[str, Any]) -> str | None:
    """Says by what rows are weighted in metrics of labels; None where all weigh the same."""
    weight = values.get("weighted_by")
    return None if weight is None else f"each row counted by its weight ({weight}), as in training"


def describe_gauc(values: Mapping[str, Any]) -> str | None:
    """Says which rows GAUC is the mean of; None where there is no GAUC."""
    gauc, rows = as_mapping(values.get("gauc")), values.get("rows")
    if gauc.get("value") is None or not rows:
        return None
    counted = f"{format_share(gauc['rows'] / rows)} of the rows"
    line = f"GAUC is of {format_count(gauc['users'])} users with both labels, {counted}"
    if unknown := gauc.get("rows_of_unknown_users"):
        line += f"; {format_count(unknown)} rows are of users outside the vocabulary"
    return line


def describe_calibration(values: Mapping[str, Any]) -> str | None:
    """Says what calibration has made of a task's probabilities; None where there is none."""
    before = as_mapping(values.get("uncalibrated"))
    if not before:
        return None
    parts = []
    for title, find in (("log loss", _find_log_loss), ("expected calibration error", _find_error)):
        pair = format_metric(find(before)), format_metric(find(values))
        parts.append("{} {} before, {} after".format(title, *pair))
    return f"calibration: {'; '.join(parts)}"


def _find_log_loss(values: Mapping[str, Any]) -> float | None:
    return to_float(values.get("log_loss"))


def _find_error(values: Mapping[str, Any]) -> float | None:
    return to_float(as_mapping(values.get("calibration")).get("expected_error"))


def metric_order(metric: str) -> tuple[int, str, int]:
    """Returns a sort key: by family, then by cut-off as a number."""
    family, _, k = metric.partition("@")
    rank = [*METRICS, family].index(family)
    return rank, family, int(k) if k.isdigit() else 0


FORMS: Mapping[str, Callable[[Any], str]] = {
    "text": str,
    "right": str,  # text that is set flush right, as numbers are
    "count": format_count,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "share": format_share,
    "metric": format_metric,
    "number": format_number,
    "value": format_value,
}
"""How the columns of a table show their values; all but text are set flush right."""
