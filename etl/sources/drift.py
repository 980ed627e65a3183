"""Schema drift: columns that are new, and columns that have gone empty."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from conf.errors import InputDataError
from conf.etl import SourceConfig
from etl.sources.counts import SourceCounts

logger = logging.getLogger("sluice.sources")

_SHOWN = 10


def check_new_columns(name: str, config: SourceConfig, new: Sequence[str]) -> None:
    """Reports columns of the input that are not declared, or refuses them.

    Raises:
        InputDataError: There is one, and `new_columns` is `fail`.
    """
    _report(
        config.new_columns,
        f"source {name!r} has columns that are not declared",
        new,
        allowed="the columns of the config",
        fix=f"declare them in sources.{name}.columns, or set sources.{name}.new_columns: ignore",
    )


def check_columns(name: str, config: SourceConfig, counts: SourceCounts) -> None:
    """Reports what the count of a source's rows says of its columns, or refuses it.

    Raises:
        InputDataError: A key of JSON lines is new, or a nullable column has no value in any good
            row, and the policy for it is `fail`.
    """
    check_new_columns(name, config, counts.new)
    _report(
        config.all_null_columns,
        f"source {name!r} has columns without a single value",
        [column for column, values in counts.values.items() if not values],
        allowed="a value in at least one row",
        fix="check that the input still fills them, take them out, or set "
        f"sources.{name}.all_null_columns: ignore",
    )


def _report(policy: str, what: str, columns: Sequence[str], allowed: str, fix: str) -> None:
    if not columns or policy == "ignore":
        return
    shown = ", ".join(columns[:_SHOWN]) + (", …" if len(columns) > _SHOWN else "")
    if policy == "fail":
        raise InputDataError(what, received=shown, allowed=allowed, fix=fix)
    logger.warning("%s: %s", what, shown)
