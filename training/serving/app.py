"""The HTTP application: TensorFlow Serving's REST API, recommendations, health, metrics, a page."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, BeforeValidator, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from conf.number_text import parse_whole
from training.serving.access import Access, Guard, refuse
from training.serving.errors import (
    EXPIRED,
    FAILED,
    INVALID,
    LEFT,
    TIMED_OUT,
    TOO_LARGE,
    RequestError,
    forget_frames,
)
from training.serving.limits import ServerLimits
from training.serving.server import Server
from training.serving.tensors import encode_json

_TARGET = re.compile(
    r"(?P<name>[^/:]+)(/versions/0*(?P<number>[0-9]{1,18})|/labels/(?P<label>[^/:]+))?"
    r"(?P<part>:predict|/metadata)?"
)
PREDICT = ":predict"
_log = logging.getLogger("sluice.training.serving")


class ListQuery(BaseModel):
    """What a GET may say of a list; a POST may say more."""

    model_config = ConfigDict(extra="forbid")

    user: str
    k: Annotated[int, BeforeValidator(parse_whole)] = 10
    seen: bool = False


def build_app(server: Server, access: Access | None = None) -> FastAPI:
    """Builds the application of a server; without `access` whoever names a loopback address asks.

    It closes the server when it ends.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.close)

    access = access or Access()
    urls = {name: f"/{name}" if access.docs else None for name in ("docs", "redoc")}
    app = FastAPI(
        title="Sluice",
        lifespan=lifespan,
        docs_url=urls["docs"],
        redoc_url=urls["redoc"],
        openapi_url="/openapi.json" if access.docs else None,
        redirect_slashes=False,
    )
    app.add_middleware(Guard, access=access)
    _add_models(app, server)
    _add_recommend(app, server)
    _add_rest(app, server)
    app.mount("/", StaticFiles(packages=[("training.serving", "page")], html=True))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        # What TensorFlow Serving says to all that it does not know below this path.
        status = INVALID if path.startswith("/v1/") else error.status_code
        return refuse(f"Malformed request: {request.method} {path[:200]}", status)

    @app.exception_handler(RequestValidationError)
    async def refuse_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refuse(f"{str(first['loc'][-1])[:100]}: {first['msg']}", INVALID)

    return app


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def list_models() -> Any:
        versions = _list_versions(server).items()
        return {"models": [{"name": name, "version": str(number)} for name, number in versions]}

    @app.get("/v1/models/{target:path}")
    async def get_model(target: str) -> Response:
        async def answer() -> bytes:
            found = _match("GET", target)
            if found["part"]:
                return server.store.get(found["name"], found["number"]).metadata
            return encode_json(server.store.describe(found["name"], found["number"]))

        return await _answer(server, "metadata" if "/metadata" in target else "status", answer)

    @app.post("/v1/models/{target:path}")
    async def post_model(target: str, request: Request) -> Response:
        def answer(body: bytes) -> Awaitable[bytes]:
            found = _match("POST", target)
            return server.predict(server.store.get(found["name"], found["number"]), body)

        method = "predict" if target.endswith(PREDICT) else "unknown"
        return await _answer(server, method, answer, request)


def _match(verb: str, target: str) -> re.Match[str]:
    found = _TARGET.fullmatch(target)
    if found is None or (verb == "POST") != (found["part"] == PREDICT):
        raise RequestError(f"Malformed request: {verb} /v1/models/{target[:200]}")
    if found["label"]:  # There are none.
        raise RequestError(f"Unrecognized servable version label: {found['label'][:100]}")
    return found


def _list_versions(server: Server) -> dict[str, int]:
    return {name: server.store.get(name).number for name in server.store.names}


def _add_recommend(app: FastAPI, server: Server) -> None:
    @app.get("/v1/recommend/inputs")
    async def get_inputs() -> Response:
        async def answer() -> bytes:
            return encode_json(server.recommender.describe_inputs())

        return await _answer(server, "inputs", answer)

    @app.get("/v1/recommend")
    async def get_recommend(query: Annotated[ListQuery, Query()]) -> Response:
        async def answer() -> bytes:
            return await server.recommend(query.model_dump_json().encode())

        return await _answer(server, "recommend", answer)

    @app.post("/v1/recommend")
    async def post_recommend(request: Request) -> Response:
        return await _answer(server, "recommend", server.recommend, request)


def _add_rest(app: FastAPI, server: Server) -> None:
    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def check() -> Any:
        served = [server.store.get(name) for name in server.store.names]
        indexes = {one.name: one.index for one in served if one.index is not None}
        return {"status": "ok", "models": _list_versions(server), "indexes": indexes}

    @app.get("/v1/limits")
    async def show_limits() -> Any:
        return server.limits.describe()

    @app.get("/metrics")
    @app.get("/monitoring/prometheus/metrics")
    async def show_metrics() -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _answer(
    server: Server,
    method: str,
    answer: Callable[..., Awaitable[bytes]],
    request: Request | None = None,
) -> Response:
    """Answers a request, whatever becomes of it, and counts it; `answer` is given its body."""
    start = time.monotonic()
    try:
        # Nothing but what waits holds the body.
        waits = answer(*([] if request is None else [await read_body(request, server.limits)]))
        async with asyncio.timeout(server.limits.seconds):
            response = Response(await waits, media_type="application/json")
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


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Reads a body, which may be so long and has its time to arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    message = f"Request body is longer than {limits.body_bytes} bytes"
                    raise RequestError(message, TOO_LARGE)
    except TimeoutError as error:
        message = f"Request body did not arrive within {limits.seconds:g} s"
        raise RequestError(message, TIMED_OUT) from error
    return bytes(body)
