"""The HTTP application: TensorFlow Serving's REST API, recommendations, health, metrics, a page."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BeforeValidator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from conf.number_text import parse_whole
from training.serving.access import Access, Guard, refuse
from training.serving.requests.errors import (
    ENCODED,
    EXPIRED,
    FAILED,
    INVALID,
    LEFT,
    TIMED_OUT,
    TOO_LARGE,
    RequestError,
    forget_frames,
)
from training.serving.requests.limits import (
    SMALL_BYTES,
    describe_list_limits,
)
from training.serving.requests.tensors import encode_json
from training.serving.server import Server

_TARGET = re.compile(
    r"(?P<model>[^/:]+)(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?(?P<part>:predict|/metadata)?"
)
_Whole = Annotated[int, BeforeValidator(parse_whole)]
PREDICT = ":predict"
MOST_VERSION = 2**63 - 1
_log = logging.getLogger("sluice.training.serving")


def build_app(server: Server, access: Access | None = None) -> FastAPI:
    """Builds the application of a server.

    Args:
        server: What answers.
        access: Who may ask; None: whoever names a loopback address.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.close)

    access = access or Access()
    docs, redoc, api = ("/docs", "/redoc", "/openapi.json") if access.docs else (None,) * 3
    app = FastAPI(
        title="Sluice",
        lifespan=lifespan,
        docs_url=docs,
        redoc_url=redoc,
        openapi_url=api,
        redirect_slashes=False,
    )
    page = (files("training.serving") / "page.html").read_text(encoding="utf-8")
    app.add_middleware(
        Guard, access=access, head_bytes=server.limits.connections.head_bytes, page=page
    )
    _add_models(app, server)
    _add_recommend(app, server)
    _add_rest(app, server, page)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        # What TensorFlow Serving says to all that it does not know below this path.
        status = INVALID if path.startswith("/v1/") else error.status_code
        return refuse(f"Malformed request: {request.method} {path[:200]}", status)

    @app.exception_handler(RequestValidationError)
    async def refuse_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refuse(f"{first['loc'][-1]}: {first['msg']}", INVALID)

    return app


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        served = [server.store.get(name) for name in server.store.names]
        found = [{"name": one.name, "version": str(one.number)} for one in served]
        return _respond(encode_json({"models": found}))

    @app.get("/v1/models/{target:path}")
    async def get_model(target: str) -> Response:
        async def answer(_: asyncio.Timeout) -> bytes:
            found = _match(target, "GET")
            named = found["model"], found["version"], found["label"]
            if found["part"]:
                return server.store.get(*named).metadata
            return encode_json(server.store.describe(*named))

        return await _answer(server, "metadata" if "/metadata" in target else "status", answer)

    @app.post("/v1/models/{target:path}")
    async def post_model(target: str, request: Request) -> Response:
        async def answer(time_left: asyncio.Timeout) -> bytes:
            found = _match(target, "POST")
            version = server.store.get(found["model"], found["version"], found["label"])
            async with _read_body(request, server, time_left) as body:
                return await server.predict(version, body)

        return await _answer(server, "predict" if target.endswith(PREDICT) else "unknown", answer)


def _match(target: str, verb: str) -> dict[str, Any]:
    match = _TARGET.fullmatch(target)
    if match is None or (verb == "POST") != (match["part"] == PREDICT):
        raise RequestError(f"Malformed request: {verb} /v1/models/{target[:200]}")
    parts = match.groupdict()
    if (number := parts["version"]) is not None:
        if len(number) > len(str(MOST_VERSION)) or int(number) > MOST_VERSION:
            raise RequestError(f"Failed to convert version: {number[:100]} to numeric.")
        parts["version"] = str(int(number))
    return parts


def _add_recommend(app: FastAPI, server: Server) -> None:
    @app.get("/v1/recommend/inputs")
    async def get_inputs() -> Response:
        async def answer(_: asyncio.Timeout) -> bytes:
            return encode_json(server.recommender.describe_inputs())

        return await _answer(server, "inputs", answer)

    @app.get("/v1/recommend")
    async def get_recommend(
        request: Request, user: str, k: _Whole = 10, seen: bool = False
    ) -> Response:
        data = {"user": user, "k": k, "seen": seen}

        async def answer(_: asyncio.Timeout) -> bytes:
            unknown = next((name for name in request.query_params if name not in data), None)
            if unknown is not None:
                raise RequestError(
                    f"{unknown[:100]}: unknown; allowed: {', '.join(data)}; a POST may have more"
                )
            _check_query(request)
            return await server.recommend(encode_json(data))

        return await _answer(server, "recommend", answer)

    @app.post("/v1/recommend")
    async def post_recommend(request: Request) -> Response:
        async def answer(time_left: asyncio.Timeout) -> bytes:
            async with _read_body(request, server, time_left) as body:
                return await server.recommend(body)

        return await _answer(server, "recommend", answer)


def _check_query(request: Request) -> None:
    """Refuses a query as a body of its kind is refused.

    Raises:
        RequestError: A name stands twice, or a value is not UTF-8.
    """
    names = [name for name, _ in request.query_params.multi_items()]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise RequestError(f"{twice[:100]}: stands twice in the query")
    try:
        unquote_to_bytes(request.scope["query_string"].replace(b"+", b" ")).decode()
    except UnicodeDecodeError as error:
        raise RequestError("the query is not UTF-8") from error


def _add_rest(app: FastAPI, server: Server, page: str) -> None:
    @app.get("/")
    async def show_page() -> Response:
        return HTMLResponse(page)

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def check() -> Response:
        served = [server.store.get(name) for name in server.store.names]
        versions = {one.name: one.number for one in served}
        indexes = {one.name: one.index for one in served if one.index is not None}
        return _respond(encode_json({"status": "ok", "models": versions, "indexes": indexes}))

    shown = encode_json({**server.limits.describe(), **describe_list_limits()})

    @app.get("/v1/limits")
    async def show_limits() -> Response:
        return _respond(shown)

    @app.get("/metrics")
    @app.get("/monitoring/prometheus/metrics")
    async def show_metrics() -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _answer(
    server: Server, method: str, answer: Callable[[asyncio.Timeout], Awaitable[bytes]]
) -> Response:
    """Answers a request, whatever becomes of it, and counts it.

    Args:
        server: What answers.
        method: Names it in the metrics.
        answer: Gives the body of the answer. It is given the time that it has, which is none while
            it reads a body.
    """
    start = time.monotonic()
    try:
        async with asyncio.timeout(server.limits.seconds) as time_left:
            response = _respond(await answer(time_left))
    except RequestError as error:
        response = refuse(error.message, error.status)
        forget_frames(error)
    except TimeoutError as error:
        response = refuse(f"not answered within {server.limits.seconds:g} s", EXPIRED)
        forget_frames(error)
    except ClientDisconnect:  # Nobody reads this answer.
        response = refuse("the client left", LEFT)
    except Exception:
        _log.exception("a request failed")
        response = refuse("the server could not answer; its log says why", FAILED)
    server.metrics.requests.labels(method, str(response.status_code)).inc()
    server.metrics.seconds.labels(method).observe(time.monotonic() - start)
    return response


def _respond(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@asynccontextmanager
async def _read_body(
    request: Request, server: Server, time_left: asyncio.Timeout
) -> AsyncIterator[bytes]:
    """Gives the body of a request; the memory of a long one counts until the answer.

    Args:
        request: The request.
        server: What answers.
        time_left: Until the answer; it begins when the body has arrived, which has its own time.

    Raises:
        RequestError: It is too long, does not arrive in time, or bodies of other requests fill the
            memory.
    """
    limits, held = server.limits, 0
    if coding := request.headers.get("content-encoding", "").strip():
        raise RequestError(
            f"a body is taken as it is, without Content-Encoding; received {coding[:100]}", ENCODED
        )
    refusal = RequestError(f"Request body is longer than {limits.body_bytes} bytes", TOO_LARGE)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limits.body_bytes:
        raise refusal
    chunks, size = [], 0
    time_left.reschedule(None)
    try:
        try:
            async with asyncio.timeout(limits.seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limits.body_bytes:
                        raise refusal
                    if size > SMALL_BYTES:
                        server.bodies.take(size - held)
                        held = size
                    chunks.append(chunk)
        except TimeoutError as error:
            raise RequestError(
                f"Request body did not arrive within {limits.seconds:g} s", TIMED_OUT
            ) from error
        time_left.reschedule(asyncio.get_running_loop().time() + limits.seconds)
        yield b"".join(chunks)
    finally:
        server.bodies.give_back(held)
