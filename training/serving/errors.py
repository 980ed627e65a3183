"""Errors of requests, with the HTTP status that TensorFlow Serving gives to each kind."""

from __future__ import annotations

INVALID, NOT_FOUND, TIMED_OUT, TOO_LARGE, FAILED, UNAVAILABLE, EXPIRED = (
    400, 404, 408, 413, 500, 503, 504)  # fmt: skip


class RequestError(Exception):
    """A request that is not answered.

    Attributes:
        status: HTTP status.
        message: What was wrong: `{"error": message}` is the body of the answer.
    """

    def __init__(self, message: str, status: int = INVALID) -> None:
        super().__init__(message)
        self.message, self.status = message, status
