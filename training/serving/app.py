"""The HTTP application: TensorFlow Serving's REST API, recommendations, health, metrics, a page."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from conf.paths import ReadablePath
from training.serving.batching import Batcher, BatchLimits
from training.serving.errors import EXPIRED, FAILED, INVALID, TIMED_OUT, TOO_LARGE, RequestError
from training.serving.known import read_item_files
from training.serving.metrics import Metrics
from training.serving.model_store import ModelStore, ServedVersion
from training.serving.recommend import RecommendConfig, Recommender, RecommendRequest
from training.serving.tensors import (
    Arrays,
    format_predict,
    parse_examples,
    parse_json,
    parse_predict,
    read_signature_name,
)

_TARGET = re.compile(
    r"(?P<model>[^/:]+)(?:/versions/(?P<version>\d+))?(?::(?P<method>[a-z]+)|(?P<part>/metadata))?"
)
METHODS = ("predict", "classify", "regress")

_log = logging.getLogger("sluice.training.serving")


@dataclass(frozen=True)
class ServerLimits:
    """What one request may cost.

    Attributes:
        body_bytes: Longest body.
        seconds: Time until a body has arrived, and then until it is answered.
        batch: Limits of calls.
    """

    body_bytes: int = 16 << 20
    seconds: float = 30.0
    batch: BatchLimits = field(default_factory=BatchLimits)


@dataclass(frozen=True)
class ServerConfig:
    """What is served.

    Attributes:
        directory: Directory of models, local or in an object store.
        poll_seconds: How often it is looked at for new versions and indexes.
        limits: What one request may cost.
        recommend: What answers `/v1/recommend`.
    """

    directory: ReadablePath
    poll_seconds: float = 2.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    recommend: RecommendConfig = field(default_factory=RecommendConfig)


class Server:
    """Answers requests by the models of a directory.

    Args:
        config: What is served.

    Raises:
        UpstreamNotReadyError: No model can be loaded.
        ConfigError: A model that is named is not there.
        InputDataError: A file of items or of blocked ones cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.metrics, self.limits = Metrics(), config.limits
        files = read_item_files(config.recommend.items_file, config.recommend.blocked_file)
        self.store = ModelStore(config.directory, config.poll_seconds, self.metrics, files)
        self.store.start()
        self.batcher = Batcher(config.limits.batch, self.metrics.batch_rows.observe)
        self.recommender = Recommender(self.store, self.batcher, config.recommend)

    async def predict(self, version: ServedVersion, data: dict[str, Any]) -> dict[str, Any]:
        """Answers `:predict`."""
        signature = read_signature_name(data)
        specs, about = version.find_specs(signature), version.find_inputs(signature)
        inputs, is_row = parse_predict(data, specs, about)
        outputs = await self.batcher.call(version, signature, inputs)
        return format_predict(outputs, is_row=is_row)

    async def classify(self, version: ServedVersion, data: dict[str, Any]) -> dict[str, Any]:
        """Answers `:classify`: classes with their scores, for each example."""
        found = await self._call_examples(version, data, "classify")
        scores = format_predict({"scores": found["scores"]}, is_row=False)["outputs"]
        classes = format_predict({"classes": found["classes"]}, is_row=False)["outputs"]
        pairs = zip(classes, scores, strict=True)
        return {"results": [[list(pair) for pair in zip(*row, strict=True)] for row in pairs]}

    async def regress(self, version: ServedVersion, data: dict[str, Any]) -> dict[str, Any]:
        """Answers `:regress`: a value for each example."""
        found = await self._call_examples(version, data, "regress")
        return {"results": format_predict(found, is_row=False)["outputs"]}

    async def _call_examples(
        self, version: ServedVersion, data: dict[str, Any], method: str
    ) -> Arrays:
        signature = str(data.get("signature_name") or method)
        about = version.card["signatures"].get(signature, {})
        if about.get("method") != method:
            version.find_specs(signature)
            raise RequestError(f"signature {signature[:100]} is not for :{method}")
        examples = parse_examples(data, about["inputs"][0]["holds"])
        return await self.batcher.call(
            version, signature, {"inputs": np.array(examples, dtype=object)}
        )

    async def recommend(self, data: dict[str, Any]) -> dict[str, Any]:
        """Answers `/v1/recommend`."""
        try:
            request = RecommendRequest.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RequestError(f"{where or 'request'}: {first['msg']}") from error
        return await self.recommender.recommend(request)

    def close(self) -> None:
        """Ends the look-out for new versions, and the threads."""
        self.store.stop()
        self.batcher.close()


def build_app(server: Server, beside: AbstractAsyncContextManager[object] | None = None) -> FastAPI:
    """Builds the application of a server.

    Args:
        server: What answers.
        beside: What else runs while the application does.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with beside or nullcontext():
            yield
        await asyncio.to_thread(server.close)

    app = FastAPI(title="Sluice", lifespan=lifespan)
    _add_models(app, server)
    _add_recommend(app, server)
    _add_rest(app, server)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        return _respond({"error": f"Malformed request: {request.method} {path}"}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def refuse_query(_: Request, error: RequestValidationError) -> Response:
        return _respond({"error": str(error.errors()[0]["msg"])}, INVALID)

    return app


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models/{target:path}")
    async def get_model(target: str) -> Response:
        async def answer() -> dict[str, Any]:
            found = _match(target, "GET")
            if found["part"]:
                return server.store.get(found["model"], found["version"]).read_metadata()
            return server.store.describe(found["model"], found["version"])

        return await _answer(server, "metadata" if "/metadata" in target else "status", answer)

    @app.post("/v1/models/{target:path}")
    async def post_model(target: str, request: Request) -> Response:
        method = target.rpartition(":")[2]

        async def answer() -> dict[str, Any]:
            found = _match(target, "POST")
            body = await _read_body(request, server.limits)
            version = server.store.get(found["model"], found["version"])
            handler = getattr(server, found["method"])
            result: dict[str, Any] = await handler(version, parse_json(body))
            return result

        return await _answer(server, method if method in METHODS else "unknown", answer)


def _match(target: str, verb: str) -> dict[str, Any]:
    found = _TARGET.fullmatch(target)
    method = found["method"] if found else None
    if found is None or (verb == "POST") != (method in METHODS):
        raise RequestError(f"Malformed request: {verb} /v1/models/{target[:200]}")
    return found.groupdict()


def _add_recommend(app: FastAPI, server: Server) -> None:
    @app.get("/v1/recommend")
    async def get_recommend(user: str, k: int = 10, seen: bool = False) -> Response:
        return await _answer(
            server, "recommend", lambda: server.recommend({"user": user, "k": k, "seen": seen})
        )

    @app.post("/v1/recommend")
    async def post_recommend(request: Request) -> Response:
        async def answer() -> dict[str, Any]:
            return await server.recommend(parse_json(await _read_body(request, server.limits)))

        return await _answer(server, "recommend", answer)


def _add_rest(app: FastAPI, server: Server) -> None:
    page = (files("training.serving") / "page.html").read_text(encoding="utf-8")

    @app.get("/")
    async def show_page() -> Response:
        return HTMLResponse(page)

    @app.get("/healthz")
    async def check() -> Response:
        served = [server.store.get(name) for name in server.store.names]
        versions = {one.name: one.number for one in served}
        indexes = {one.name: one.index for one in served if one.index is not None}
        return _respond({"status": "ok", "models": versions, "indexes": indexes})

    @app.get("/metrics")
    @app.get("/monitoring/prometheus/metrics")
    async def show_metrics() -> Response:
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _answer(
    server: Server, method: str, answer: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    """Answers a request, whatever becomes of it, and counts it."""
    start = time.monotonic()
    try:
        body = await asyncio.wait_for(answer(), 2 * server.limits.seconds)
        response = _respond(body)
    except RequestError as error:
        response = _respond({"error": error.message}, error.status)
    except TimeoutError:
        seconds = server.limits.seconds
        response = _respond({"error": f"not answered within {seconds:g} s"}, EXPIRED)
    except Exception:
        _log.exception("a request failed")
        response = _respond({"error": "the server could not answer; its log says why"}, FAILED)
    server.metrics.requests.labels(method, str(response.status_code)).inc()
    server.metrics.seconds.labels(method).observe(time.monotonic() - start)
    return response


def _respond(body: dict[str, Any], status: int = 200) -> Response:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Response(text, status, media_type="application/json")


async def _read_body(request: Request, limits: ServerLimits) -> bytes:
    """Reads a body.

    Raises:
        RequestError: It is too long, or does not arrive in time.
    """
    refusal = RequestError(f"Request body is longer than {limits.body_bytes} bytes", TOO_LARGE)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise refusal
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise refusal
                chunks.append(chunk)
    except TimeoutError as error:
        raise RequestError(
            f"Request body did not arrive within {limits.seconds:g} s", TIMED_OUT
        ) from error
    return b"".join(chunks)
