"""Names that a user gives and that are not there: one way to say so."""

from __future__ import annotations

from collections.abc import Iterable

from conf.errors import ConfigError, did_you_mean


def refuse_unknown(what: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuses names that are not there, with the nearest one that is.

    Args:
        what: What is wrong, for the error.
        unknown: Names that are not there; without any nothing happens.
        known: Names that are.

    Raises:
        ConfigError: There is an unknown name; all of them are listed.
    """
    names, known = list(unknown), list(known)
    if names:
        raise ConfigError(
            what,
            received=", ".join(names),
            allowed=", ".join(known),
            fix=did_you_mean(names[0], known),
        )
