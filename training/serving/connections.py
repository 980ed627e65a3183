"""Connections of the HTTP server: how many there are, and how long each may take its time.

uvicorn ends a connection that is silent after an answer. It waits for ever for the first byte, for
the rest of a head, and for a client that does not read, and takes any number of connections.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from training.serving.limits import ConnectionLimits

LINGER_SECONDS = 0.5
"""How long a connection that was refused stays, so that its client can read why."""


class Connection(HttpToolsProtocol):
    """A connection with limits; `build_protocol` sets them."""

    limits = ConnectionLimits()
    refused: set[Connection]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or answers 503 where there are enough."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._has_begun = self._is_lingering = False
        self._head_bytes: int | None = None
        if len(self.connections) < self.limits.count:
            super().connection_made(transport)
            self._await_head(self.limits.idle_seconds)
            return
        self.transport = transport
        if len(self.refused) >= self.limits.count:
            transport.abort()
            return
        self.refused.add(self)
        message = f"the server is full: it has {self.limits.count} connections; try again later"
        transport.write(_build_answer(503, "Service Unavailable", message))
        self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection."""
        self._stop(self._timer)
        self._stop(self._writing)
        if self in self.refused:
            self.refused.discard(self)
        elif self.flow is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what has come; a head that has begun must be whole in time, and not be long."""
        if self._is_lingering or self.transport.is_closing():
            return  # What a refused one sends is not read.
        if self._is_waiting and not self._has_begun:
            self._has_begun = True
            self._await_head(self.limits.head_seconds)
        super().data_received(data)
        if not self._is_waiting:
            self._has_begun = False
            self._stop(self._timer)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begins to count the bytes of a head."""
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Begins to answer; `Guard` measures heads that are whole."""
        self._head_bytes = None
        super().on_headers_complete()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self, seconds: float) -> None:
        self._stop(self._timer)
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        """Ends a connection whose next request does not come."""
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self._has_begun and self._is_waiting:
            seconds = self.limits.head_seconds
            message = f"the head of the request did not arrive within {seconds:g} s"
            self.transport.write(_build_answer(408, "Request Timeout", message))
            self.transport.close()
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Waits for the next request; one that was sent before this answer begins at once.

        A body that nobody has read, as the request was refused, would be read to its end first.
        """
        self._await_head(self.limits.idle_seconds)
        super().on_response_complete()
        if not self._is_waiting:
            self._stop(self._timer)
        elif self.cycle.more_body:
            self._stop(self._timer)
            self.flow.resume_reading()
            self._linger()

    def _linger(self) -> None:
        """Ends a connection whose client may still be sending.

        A connection that is closed while bytes are unread is reset, and the answer with it.
        """
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """Gives a client that does not read some time."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on writing."""
        super().resume_writing()
        self._stop(self._writing)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP/1.1, as all errors are answered."""
        if self._is_waiting or not self.cycle.response_started:
            message = "Malformed request: this is no HTTP/1.1, or its head is too long"
            self.transport.write(_build_answer(400, "Bad Request", message))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a client that asks for another protocol is answered in this one."""

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def build_protocol(limits: ConnectionLimits) -> type[Connection]:
    """Builds the protocol of a server."""
    attributes: dict[str, Any] = {"limits": limits, "refused": set()}
    return type("LimitedConnection", (Connection,), attributes)


def _build_answer(status: int, reason: str, message: str) -> bytes:
    body = json.dumps({"error": message}).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
