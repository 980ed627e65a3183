"""Settings of a job's Spark session: the section `spark` of a build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_TIME_ZONE = "spark.sql.session.timeZone"
_VOCABULARY_BYTES = "spark.sluice.vocabularyBytes"


def read_vocabulary_bytes(settings: Mapping[str, str]) -> int:
    """Returns the bytes of tokens up to which each Python worker holds a vocabulary."""
    text = settings.get(_VOCABULARY_BYTES, str(256 << 20))
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{_VOCABULARY_BYTES} is a positive whole number, not {text!r}")
    return int(text)


def _flatten(given: Any) -> Any:
    """Writes names as Spark does: `driver: {memory: 4g}` is `spark.driver.memory`."""
    return dict(_list_settings("", given)) if isinstance(given, Mapping) else given


def _list_settings(above: str, given: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _list_settings(f"{name}.", value)
        else:
            text = str(value).lower() if isinstance(value, bool | int | float) else value
            yield (name if name.startswith("spark.") else f"spark.{name}"), text


def _check(settings: dict[str, str]) -> dict[str, str]:
    read_vocabulary_bytes(settings)
    # Times of a log without a zone are UTC on every machine.
    if _TIME_ZONE in settings:
        raise ValueError(
            f"{_TIME_ZONE} is always UTC; times of another zone are read by the "
            "`timestamp_format` of their column, with a zone in the text"
        )
    return settings


SparkSettings = Annotated[dict[str, str], BeforeValidator(_flatten), AfterValidator(_check)]
"""Settings of Spark by name; the `spark.` in front may be left out."""
