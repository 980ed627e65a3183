"""Calls by gRPC: who may make them, how their messages arrive, and what is refused of them.

A method is taken as one that reads a stream, of which it reads one message: that is the same on the
wire, and leaves to the server when a message is received, for how long, and who parses it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from training.serving.access import Access
from training.serving.requests.errors import (
    EXPIRED,
    FAILED,
    INVALID,
    LEFT,
    NO_TOKEN,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    UNAVAILABLE,
    RequestError,
    forget_frames,
)
from training.serving.requests.limits import ARRIVING, HURRIED_SECONDS, SMALL_BYTES
from training.serving.server import Server

CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    NO_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}

RequestT = TypeVar("RequestT", bound=Message)

_log = logging.getLogger("sluice.training.serving")


class CallError(RequestError):
    """A call that TensorFlow Serving refuses with a code that the REST API has no status for.

    Attributes:
        code: The code.
    """

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class Calls:
    """Takes calls, and answers or refuses them.

    Args:
        server: What answers.
        access: Who may ask.
    """

    def __init__(self, server: Server, access: Access) -> None:
        self._server, self._access = server, access
        self._arriving: dict[asyncio.Timeout, float] = {}

    def build_method(
        self,
        name: str,
        kind: type[RequestT],
        answer: Callable[[RequestT], Awaitable[Message]],
    ) -> grpc.RpcMethodHandler:
        """Builds a method of a service.

        Args:
            name: Counts its calls.
            kind: Message that it takes.
            answer: What answers it.
        """

        async def handle(messages: AsyncIterator[bytes], context: Any) -> Message:
            async def take() -> Message:
                self._check_token(context)
                async with self._receive(messages, kind) as request:
                    return await asyncio.wait_for(answer(request), self._server.limits.seconds)

            return await self._handle(name, context, take)

        return grpc.stream_unary_rpc_method_handler(
            handle, response_serializer=lambda message: message.SerializeToString()
        )

    async def _handle(
        self, name: str, context: Any, take: Callable[[], Awaitable[Message]]
    ) -> Message:
        """Answers a call, whatever becomes of it, and counts it."""
        start, status, message, code = time.monotonic(), 200, "", None
        try:
            return await take()
        except RequestError as error:
            status, message, code = error.status, error.message, getattr(error, "code", None)
            forget_frames(error)
        except TimeoutError as error:
            status = EXPIRED
            message = f"not answered within {self._server.limits.seconds:g} s"
            forget_frames(error)
        except asyncio.CancelledError:
            status = LEFT
            raise
        except Exception:
            _log.exception("a call failed")
            status, message = FAILED, "the server could not answer; its log says why"
        finally:
            self._server.metrics.requests.labels(name, str(status)).inc()
            self._server.metrics.seconds.labels(name).observe(time.monotonic() - start)
        await context.abort(code or CODES.get(status, grpc.StatusCode.INTERNAL), message)
        raise AssertionError("a call that is aborted does not go on")

    def _check_token(self, context: Any) -> None:
        given = {str(name): value for name, value in context.invocation_metadata() or ()}
        if not self._access.allows_token(given.get("authorization")):
            raise RequestError("a call needs the metadata authorization: Bearer TOKEN", NO_TOKEN)

    @asynccontextmanager
    async def _receive(
        self, messages: AsyncIterator[bytes], kind: type[RequestT]
    ) -> AsyncIterator[RequestT]:
        """Gives the message of a call, which counts as a body while the block runs.

        Raises:
            RequestError: None arrives in time, it does not parse, or others fill the memory.
        """
        body = await self._read(messages)
        size = len(body) if len(body) > SMALL_BYTES else 0
        self._server.bodies.take(size)
        try:
            yield await self._server.builder.run(len(body), _parse, kind, body)
        finally:
            self._server.bodies.give_back(size)

    async def _read(self, messages: AsyncIterator[bytes]) -> bytes:
        """Reads the message of a call; where many arrive, the earliest are hurried."""
        seconds = self._server.limits.seconds
        timer = asyncio.timeout(seconds)
        try:
            async with timer:
                self._arriving[timer] = asyncio.get_running_loop().time()
                self._hurry()
                async for message in messages:
                    return message
        except TimeoutError as error:
            raise RequestError(
                f"the message did not arrive within {seconds:g} s, or others needed its place",
                TIMED_OUT,
            ) from error
        finally:
            self._arriving.pop(timer, None)
        raise RequestError("the call has no message")

    def _hurry(self) -> None:
        if len(self._arriving) > ARRIVING:
            earliest = next(iter(self._arriving))
            until = self._arriving.pop(earliest) + HURRIED_SECONDS
            if not earliest.expired():
                earliest.reschedule(min(until, earliest.when() or until))


def _parse(kind: type[RequestT], body: bytes) -> RequestT:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the message does not parse as {kind.DESCRIPTOR.name}") from error
