"""TensorFlow Serving's gRPC `PredictionService`: `Predict` and `GetModelMetadata`.

Requests are answered by the same versions, batches and limits as those of the REST API.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis.get_model_metadata_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    SignatureDefMap,
)
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
from tensorflow_serving.apis.prediction_service_pb2_grpc import (
    PredictionServiceServicer,
    add_PredictionServiceServicer_to_server,
)

from training.serving.app import Server
from training.serving.errors import (
    EXPIRED,
    FAILED,
    INVALID,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    UNAVAILABLE,
    RequestError,
)
from training.serving.model_store import ServedVersion
from training.serving.tensors import Arrays, check_finite, check_names, check_times

CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
SIGNATURES = "signature_def"

AnswerT = TypeVar("AnswerT")

_log = logging.getLogger("sluice.training.serving")


class PredictionService(PredictionServiceServicer):
    """Answers calls; those that are not named here are unimplemented.

    Args:
        server: What answers.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    async def Predict(  # noqa: N802  The API's name.
        self, request: PredictRequest, context: Any
    ) -> PredictResponse:
        """Calls a signature."""
        return await self._answer("grpc_predict", context, lambda: self._predict(request))

    async def GetModelMetadata(  # noqa: N802  The API's name.
        self, request: GetModelMetadataRequest, context: Any
    ) -> GetModelMetadataResponse:
        """Returns the signatures of a version."""

        async def answer() -> GetModelMetadataResponse:
            return self._describe(request)

        return await self._answer("grpc_metadata", context, answer)

    async def _predict(self, request: PredictRequest) -> PredictResponse:
        version = self._find(request.model_spec)
        signature = request.model_spec.signature_name or "serving_default"
        specs, about = version.find_specs(signature), version.find_inputs(signature)
        inputs = self._read_inputs(request.inputs, specs)
        for name, values in inputs.items():
            check_times(name, values, about.get(name))
        outputs = await self._server.batcher.call(version, signature, inputs)
        names = list(request.output_filter) or list(outputs)
        if unknown := sorted(set(names) - set(outputs)):
            raise RequestError(f"output_filter names {unknown}; allowed: {', '.join(outputs)}")
        answer = PredictResponse(model_spec=_build_spec(version, signature))
        for name in names:
            answer.outputs[name].CopyFrom(tf.make_tensor_proto(outputs[name]))
        return answer

    def _describe(self, request: GetModelMetadataRequest) -> GetModelMetadataResponse:
        if set(request.metadata_field) != {SIGNATURES}:
            raise RequestError(f"metadata_field must be [{SIGNATURES}]")
        version = self._find(request.model_spec)
        answer = GetModelMetadataResponse(model_spec=_build_spec(version))
        found = SignatureDefMap(signature_def=version.read_signatures())
        answer.metadata[SIGNATURES].Pack(found)
        return answer

    def _find(self, spec: ModelSpec) -> ServedVersion:
        if spec.version_label:
            raise RequestError("versions have no labels here; name a version, or none", NOT_FOUND)
        number = str(spec.version.value) if spec.HasField("version") else None
        return self._server.store.get(spec.name, number)

    def _read_inputs(self, given: Mapping[str, Any], specs: Mapping[str, tf.TensorSpec]) -> Arrays:
        check_names(given, specs)
        most = self._server.limits.body_bytes
        return {name: _read_tensor(name, given[name], spec, most) for name, spec in specs.items()}

    async def _answer(
        self, method: str, context: Any, answer: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Answers a call, whatever becomes of it, and counts it."""
        start, status, message = time.monotonic(), 200, ""
        seconds = self._server.limits.seconds
        try:
            return await asyncio.wait_for(answer(), 2 * seconds)
        except RequestError as error:
            status, message = error.status, error.message
        except TimeoutError:
            status, message = EXPIRED, f"not answered within {seconds:g} s"
        except Exception:
            _log.exception("a call failed")
            status, message = FAILED, "the server could not answer; its log says why"
        finally:
            self._server.metrics.requests.labels(method, str(status)).inc()
            self._server.metrics.seconds.labels(method).observe(time.monotonic() - start)
        await context.abort(CODES.get(status, grpc.StatusCode.INTERNAL), message)
        raise AssertionError("a call that is aborted does not go on")


def _build_spec(version: ServedVersion, signature: str = "") -> ModelSpec:
    spec = ModelSpec(name=version.name, signature_name=signature)
    spec.version.value = version.number
    return spec


def _read_tensor(name: str, tensor: Any, spec: tf.TensorSpec, most: int) -> np.ndarray:
    """Returns an input; a few bytes can stand for any number of equal values, `most` at most."""
    shape = [dimension.size for dimension in tensor.tensor_shape.dim]
    known = not tensor.tensor_shape.unknown_rank and min(shape, default=0) >= 0
    if tensor.dtype != spec.dtype.as_datatype_enum or not known or math.prod(shape) > most:
        _refuse(name, spec, f"type {tensor.dtype} of shape {shape}")
    if not spec.shape.is_compatible_with(shape):
        _refuse(name, spec, f"shape {shape}")
    try:
        values = np.asarray(tf.make_ndarray(tensor))
    except (TypeError, ValueError, IndexError) as error:
        raise RequestError(f"input {name} does not decode: {error}"[:300]) from error
    check_finite(name, values)
    return values


def _refuse(name: str, spec: tf.TensorSpec, received: str) -> NoReturn:
    shape = [-1 if size is None else size for size in spec.shape]
    raise RequestError(
        f"input {name} must be {spec.dtype.name} (type {spec.dtype.as_datatype_enum}) of shape "
        f"{shape}; received {received}"
    )


@asynccontextmanager
async def run_service(server: Server, address: str) -> AsyncIterator[int]:
    """Answers calls while the block runs; those that have begun are answered before it ends.

    Args:
        server: What answers.
        address: `host:port`; port 0 takes any free one.

    Yields:
        The port.

    Raises:
        RuntimeError: The address is taken.
    """
    size = server.limits.body_bytes
    options = [("grpc.max_receive_message_length", size), ("grpc.so_reuseport", 0)]
    found = grpc.aio.server(options=options)
    add_PredictionServiceServicer_to_server(PredictionService(server), found)
    port = found.add_insecure_port(address)
    await found.start()
    try:
        yield port
    finally:
        await found.stop(2 * server.limits.seconds)
