"""Errors of requests, with the HTTP status that TensorFlow Serving gives to each kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from training.raw_inputs.requests import RawValueError

INVALID, NO_TOKEN, NOT_FOUND, TIMED_OUT, TOO_LARGE, ENCODED, WRONG_HOST, LONG_HEAD, LEFT = (
    400, 401, 404, 408, 413, 415, 421, 431, 499)  # fmt: skip
FAILED, UNAVAILABLE, EXPIRED = 500, 503, 504

MESSAGE_CHARACTERS = 460
"""Longest message; what is escaped in JSON makes it shorter still."""
SEARCHED_CHARACTERS = 4096
"""What is searched of a text from outside: its beginning."""
_FOLDERS = re.compile(r"(?:\b[a-z][a-z0-9+.-]{0,30}:/)?(?<![\w.)\]])/(?:[^/\s:;,'\"]+/)+")


class RequestError(Exception):
    """A request that is not answered.

    Attributes:
        status: HTTP status.
        message: What was wrong: `{"error": message}` is the body of the answer. It is cut at
            `MESSAGE_CHARACTERS`.
    """

    def __init__(self, message: str, status: int = INVALID) -> None:
        super().__init__(message)
        self.message, self.status = cut(message), status


@contextmanager
def refuse_values() -> Iterator[None]:
    """Answers raw values that a model does not read with what is wrong with them.

    Raises:
        RequestError: There is such a value.
    """
    try:
        yield
    except RawValueError as error:
        raise RequestError(str(error)) from error


def forget_frames(error: BaseException) -> None:
    """Lets go what the frames of an error hold: whole requests, which nothing else would free soon.

    Tasks and futures hold an error whose frames hold them.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def cut(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """Returns a text without its end where it is too long, with `?` for halves of characters."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode("utf-8", "replace").decode()


def hide_folders(text: str) -> str:
    """Returns a text in which paths and URIs have lost their folders: clients need not know them.

    What is left is the last part, the file's own name; of a long text its beginning.
    """
    return _FOLDERS.sub("", text[:SEARCHED_CHARACTERS])
