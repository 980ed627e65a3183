"""The columns that histories, sessions and rolling features add to the events."""

from __future__ import annotations

from conf.etl import BehaviourHistoryConfig, BuildConfig


def all_histories(config: BuildConfig) -> tuple[BehaviourHistoryConfig, ...]:
    """Returns the plain history, where there is one, and the declared ones."""
    if config.history is None:
        return config.histories
    plain = BehaviourHistoryConfig(name=config.history.name, max_len=config.history.max_len)
    return (plain, *config.histories)


def history_names(config: BuildConfig) -> tuple[str, ...]:
    """Returns the columns of all histories: lists that are known for a user without an event."""
    return tuple(name for history in all_histories(config) for name in history.made)


def made_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the type of each column that is made here."""
    made: dict[str, str] = {}
    origins, types = column_origins(config), config.event_column_types
    for history in all_histories(config):
        made |= {
            name: f"list<{types[origins[name]] if name in origins else 'float32'}>"
            for name in history.made
        }
    if config.sessions is not None:
        made |= {config.sessions.id_column: "string", config.sessions.position_column: "int64"}
    return made | {r.name: "float32" if r.rate else "int64" for r in config.rolling}


def column_origins(config: BuildConfig) -> dict[str, str]:
    """Returns the event column whose values each list of a history holds; gaps have none."""
    return {
        name: column
        for history in all_histories(config)
        for name, column in (
            (history.name, config.events.item or ""),
            *((history.carried(column), column) for column in history.columns),
        )
    }
