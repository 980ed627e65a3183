"""Errors of requests, with the HTTP status that TensorFlow Serving gives to each kind."""

from __future__ import annotations

import re

INVALID, NO_TOKEN, NOT_FOUND, TIMED_OUT, TOO_LARGE, WRONG_HOST, LEFT = (
    400, 401, 404, 408, 413, 421, 499)  # fmt: skip
FAILED, UNAVAILABLE, EXPIRED = 500, 503, 504

MESSAGE_CHARACTERS = 460
SEARCHED_CHARACTERS = 4096
"""What is searched of a text from outside: its beginning."""
_FOLDERS = re.compile(r"(?:\b[a-z][a-z0-9+.-]{0,30}:/)?(?<![\w.)\]])/(?:[^/\s:;,'\"]+/)+")


class RequestError(Exception):
    """A request that is not answered; the body of the answer is `{"error": message}`."""

    def __init__(self, message: str, status: int = INVALID) -> None:
        super().__init__(message)
        self.message, self.status = cut(message), status


def forget_frames(error: BaseException) -> None:
    """Lets go what the frames of an error hold: whole requests, in circles with tasks."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def cut(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """Returns a text without its end where it is too long, with `?` for halves of characters."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode("utf-8", "replace").decode()


def hide_folders(text: str) -> str:
    """Returns the beginning of a text, its paths and URIs without folders."""
    return cut(_FOLDERS.sub("", text[:SEARCHED_CHARACTERS]))
