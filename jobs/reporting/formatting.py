"""Numbers, names of metrics and cells of tables as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than a value.

    Attributes:
        value: The value; the column's form turns it into text.
        best: Whether it is the best of its row, shown in bold.
        bar: Length of a bar behind the text, in [0, 1]; None for no bar.
        tone: Colour of the bar: a key of `plots.COLOURS`.
        href: Page beside this one that the text leads to, as a relative URL; None for no link.
        bins: Name and count of each bin of a small histogram, shown instead of the value.
    """

    value: Any
    best: bool = False
    bar: float | None = None
    tone: str = "model"
    href: str | None = None
    bins: Sequence[tuple[str, float]] = ()


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def plain_words(name: str) -> str:
    """Returns an identifier as words: `read_sources` -> `read sources`."""
    return name.replace("_", " ")


def capital_words(name: str) -> str:
    """Returns an identifier as words, the first letter a capital."""
    words = plain_words(name)
    return words[:1].upper() + words[1:]


def share_of(part: Any, whole: Any) -> float | None:
    """Returns a part as a share of the whole, None where either is not a number or the whole is 0.

    The share is at most 1.
    """
    numerator, denominator = to_float(part), to_float(whole)
    if numerator is None or not denominator:
        return None
    return min(numerator / denominator, 1.0)


def to_float(value: Any) -> float | None:
    """Returns a finite number, None for anything else (None, NaN, text, a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def format_count(value: Any) -> str:
    """Returns a count with thousands separators: `1,000,209`."""
    number = to_float(value)
    return MISSING if number is None else f"{number:,.0f}"


def format_bytes(value: Any) -> str:
    """Returns a size in decimal units: `12.3 MB`."""
    number = to_float(value)
    if number is None:
        return MISSING
    if abs(number) < 999.5:
        return f"{number:,.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if abs(number) < 999.95:
            return f"{number:,.1f} {unit}"
    return f"{number / 1000:,.1f} TB"


def format_seconds(value: Any) -> str:
    """Returns a duration: `84 ms`, `12.3 s`, `2 min 05 s`, `3 h 20 min`."""
    number = to_float(value)
    if number is None:
        return MISSING
    if number < 0.9995:
        return f"{number * 1000:.0f} ms"
    if number < 59.95:
        return f"{number:.1f} s"
    minutes, seconds = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_share(value: Any) -> str:
    """Returns a share of one as a percentage; a share that is not quite 0 or 1 never reads so."""
    number = to_float(value)
    if number is None:
        return MISSING
    if 0 < number < 0.0005:
        return "<0.1%"
    if 0.9995 <= number < 1:
        return ">99.9%"
    return f"{number:.0%}" if number in (0, 1) else f"{number:.1%}"


def format_metric(value: Any) -> str:
    """Returns a quality metric with four decimals, as papers print it."""
    number = to_float(value)
    # Rounded first, so that a value near 0 does not read as -0.0000.
    return MISSING if number is None else f"{round(number, 4) + 0.0:.4f}"


def format_number(value: Any) -> str:
    """Returns any plain value: whole and large numbers in full, others with four digits."""
    number = to_float(value)
    if number is None:
        return MISSING
    if number == int(number) and abs(number) < 1e12:
        return f"{int(number):,}"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e12 else f"{number:.4g}"


def format_value(value: Any) -> str:
    """Returns a value of a config: numbers with four figures, nothing where there is none."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


_TITLES = {"hit_rate": "HR", "ndcg": "NDCG", "recall": "Recall", "mrr": "MRR", "loss": "Loss"}
_FAMILIES = ("hit_rate", "ndcg", "recall", "mrr")


def metric_title(metric: str) -> str:
    """Returns a metric's name as papers write it: `hit_rate@10` -> `HR@10`."""
    family, at, k = metric.partition("@")
    return f"{_TITLES.get(family, family)}{at}{k}"


def metric_order(metric: str) -> tuple[int, str, int]:
    """Returns a sort key: by family, then by cut-off as a number."""
    family, _, k = metric.partition("@")
    rank = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
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
