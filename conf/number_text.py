"""Numbers from text, as a build reads them: digits of ASCII, no underscores, spaces around them."""

from __future__ import annotations

import re

SPACES = " \t\n\r\f\v"
_WHOLE = re.compile("[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_whole(text: str) -> int:
    """Reads a whole number.

    Raises:
        ValueError: It is none.
    """
    bare = text.strip(SPACES)
    if not _WHOLE.fullmatch(bare):
        raise ValueError(f"{text!r} is no whole number")
    return int(bare)


def parse_real(text: str) -> float:
    """Reads a number; infinities and NaN are none.

    Raises:
        ValueError: It is none.
    """
    return float(bare_real(text))


def bare_real(text: str) -> str:
    """Returns the text of a number without the spaces around it.

    Raises:
        ValueError: It is none.
    """
    bare = text.strip(SPACES)
    if not _REAL.fullmatch(bare):
        raise ValueError(f"{text!r} is no number")
    return bare
