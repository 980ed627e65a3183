"""What one dictionary join is, with its source's key and size resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conf.etl import BuildConfig, JoinConfig
from etl.sources import Source


@dataclass(frozen=True)
class DictionaryJoin:
    """One dictionary join.

    Attributes:
        name: The dictionary's name.
        key: Its key column.
        config: Event column, strategy, as-of columns, what happens to unmatched events.
        dictionary_bytes: Size of the dictionary's files, None where its source has no files.
        event_bytes: Size of the log's files, None where it has none.
    """

    name: str
    key: str
    config: JoinConfig
    dictionary_bytes: int | None = None
    event_bytes: int | None = None

    @property
    def on(self) -> str:
        """Event column that holds the key."""
        return self.config.column

    @property
    def unique_columns(self) -> tuple[str, ...]:
        """Columns whose values no two rows of the dictionary may share."""
        as_of = self.config.as_of
        if as_of is None:
            return (self.key,)
        return (self.key, as_of.valid_from, *((as_of.known_at,) if as_of.known_at else ()))


def plan_joins(config: BuildConfig, sources: Mapping[str, Source]) -> tuple[DictionaryJoin, ...]:
    """Resolves the joins of a config, in their order."""
    log = _size(sources[config.events.source])
    return tuple(
        DictionaryJoin(
            join.source,
            config.sources[join.source].key or "",
            join,
            _size(sources[join.source]),
            log,
        )
        for join in config.joins
    )


def _size(source: Source) -> int | None:
    return sum(file.bytes for file in source.files) if source.files else None
