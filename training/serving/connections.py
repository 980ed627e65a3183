"""Connections of the HTTP server: how many there are, and how long each may take its time.

uvicorn ends a connection that is silent after an answer. It waits for ever for the first byte, for
the rest of a head, and for a client that does not read, and takes any number of connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from training.serving.access import POLICY, SECURITY_HEADERS
from training.serving.requests.limits import PIPELINED, ConnectionLimits

LINGER_SECONDS = 0.5
"""How long a connection that ends stays while its client neither sends nor reads."""
PART_BYTES = 1 << 12
"""What is parsed at a time, as each few bytes may be a request that waits."""


class _Flow(FlowControl):
    """Reads nothing while requests wait: each read could bring thousands more."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Reads on, where no request waits."""
        if not self._pipeline:
            super().resume_reading()


class _Transport:
    """Where answers are written; what is closed by an answer lingers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing

    def close(self) -> None:
        self._connection.linger()


class Connection(HttpToolsProtocol):
    """A connection with limits; `build_protocol` sets them."""

    limits = ConnectionLimits()
    refused: set[Connection]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or answers 503 where there are enough."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._has_begun = self._is_lingering = self._has_sent = False
        self._is_in_head, self._has_moved, self._loose_bytes = False, False, 0
        self._unparsed = memoryview(b"")
        if len(self.connections) < self.limits.count:
            super().connection_made(transport)
            self.flow = _Flow(transport, self.pipeline)
            self._await_head(self.limits.idle_seconds)
            return
        self.transport = transport
        if len(self.refused) >= self.limits.count:
            transport.abort()
            return
        self.refused.add(self)
        message = f"the server is full: it has {self.limits.count} connections; try again later"
        transport.write(_build_answer(503, "Service Unavailable", message))
        self.linger(LINGER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection."""
        self._stop(self._timer)
        self._stop(self._writing)
        if self in self.refused:
            self.refused.discard(self)
        elif self.flow is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what has come; what a connection that ends sends is let go."""
        self._has_sent = True
        if self._is_lingering or self.transport.is_closing():
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        self._parse()

    def _parse(self) -> None:
        """Parses what has come, until enough requests wait."""
        while self._unparsed and len(self.pipeline) < PIPELINED:
            if self._is_lingering or self.transport.is_closing():
                return
            part, self._unparsed = self._unparsed[:PART_BYTES], self._unparsed[PART_BYTES:]
            self._parse_part(part)

    def _parse_part(self, part: memoryview) -> None:
        """Parses some bytes; a head that has begun must be whole in time, and not be long.

        Heads, sizes of chunks, and what follows the last chunk are loose bytes.
        """
        if self._is_waiting and not self._has_begun:
            self._has_begun = True
            self._await_head(self.limits.head_seconds)
        self._has_moved = False
        super().data_received(part)  # type: ignore[arg-type]
        if not self._is_waiting:
            self._has_begun = False
            self._stop(self._timer)
        self._loose_bytes = 0 if self._has_moved else self._loose_bytes + len(part)
        if self._loose_bytes > self.limits.head_bytes and not self._is_lingering:
            message = f"the head of a request may have {self.limits.head_bytes} bytes"
            self._refuse(431, "Request Header Fields Too Large", message)

    def on_message_begin(self) -> None:
        """Begins a head."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; what follows a body is none."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begins to answer; `Guard` measures heads that are whole."""
        self._is_in_head, self._has_moved = False, True
        super().on_headers_complete()
        self.cycle.transport = _Transport(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        self._has_moved = True
        super().on_message_complete()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self, seconds: float) -> None:
        self._stop(self._timer)
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        """Ends a connection whose next request does not come."""
        if self._has_begun and self._is_waiting and not self.transport.is_closing():
            seconds = self.limits.head_seconds
            message = f"the head of the request did not arrive within {seconds:g} s"
            self.transport.write(_build_answer(408, "Request Timeout", message))
            self.linger()
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Waits for the next request; one that was sent before this answer begins at once.

        A body that nobody has read, as the request was refused, would be read to its end first.
        """
        if self._is_lingering:  # The client, or HTTP/1.0, asked for the end.
            self.server_state.total_requests += 1
            return
        self._await_head(self.limits.idle_seconds)
        super().on_response_complete()
        if not self._is_waiting:
            self._stop(self._timer)
        elif self.cycle.more_body:
            self.linger()
        self._parse()

    def linger(self, seconds: float | None = None) -> None:
        """Ends a connection whose client may still be sending, or has not read all.

        A connection that is closed while bytes are unread is reset, and the answer with it.

        Args:
            seconds: How long it stays at most; None: as long as a client has to read.
        """
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        self._stop(self._timer)
        self._unparsed = memoryview(b"")
        self.pipeline.clear()
        if self.flow is not None:
            self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        seconds = self.limits.write_seconds if seconds is None else seconds
        self._await_silence(self.loop.time() + seconds)

    def _await_silence(self, until: float) -> None:
        """Closes a connection when nothing is sent or read for a while."""
        self._has_sent = False

        def look() -> None:
            is_busy = self._has_sent or self.transport.get_write_buffer_size() > 0
            if is_busy and self.loop.time() < until:
                self._await_silence(until)
            else:
                self.transport.abort()

        self._timer = self.loop.call_later(LINGER_SECONDS, look)

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
        self._refuse(400, "Bad Request", "Malformed request: this is no HTTP/1.1")

    def _refuse(self, status: int, reason: str, message: str) -> None:
        if self.pipeline or not (self._is_waiting or not self.cycle.response_started):
            self.transport.close()  # In the midst of another answer.
            return
        self.transport.write(_build_answer(status, reason, message))
        if self.cycle is not None:  # Its request does not end.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.linger()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a client that asks for another protocol is answered in this one.

        What it has sent behind its request may be of that protocol.
        """
        self._unparsed = memoryview(b"")

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
        f"Content-Length: {len(body)}\r\nConnection: close\r\nContent-Security-Policy: {POLICY}\r\n"
    )
    more = b"".join(name + b": " + value + b"\r\n" for name, value in SECURITY_HEADERS)
    return head.encode() + more + b"\r\n" + body
