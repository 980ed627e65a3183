"""The error of a raw value that is not what an input takes, and how it shows the value."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any


class RawValueError(Exception):
    """A value, or the name of one, is not what a model reads; the message names the input."""


class _Short(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 20, 10, 4


def show(value: Any) -> str:
    """Returns the beginning of a value as Python writes it, whatever its length."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
