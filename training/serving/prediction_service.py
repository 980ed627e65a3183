"""TensorFlow Serving's gRPC `PredictionService`: `Predict` and `GetModelMetadata`.

Requests are answered by the same versions, batches and limits as those of the REST API.
"""

from __future__ import annotations

import asyncio
import logging
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

from training.serving.access import Access
from training.serving.app import Server
from training.serving.errors import (
    EXPIRED,
    FAILED,
    INVALID,
    NO_TOKEN,
    NOT_FOUND,
    TIMED_OUT,
    TOO_LARGE,
    UNAVAILABLE,
    RequestError,
    forget_frames,
)
from training.serving.limits import check_count
from training.serving.model_store import ServedVersion
from training.serving.tensors import Arrays, check_finite, check_names, check_times

CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    NO_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
SIGNATURES = "signature_def"
STREAMS, IDLE_SECONDS = 256, 300.0
"""Calls of a connection at a time; until one without a call is closed."""
MOST_AXES = 8
"""Axes of a tensor whose shape is looked at."""

AnswerT = TypeVar("AnswerT")

_log = logging.getLogger("sluice.training.serving")


class PredictionService(PredictionServiceServicer):
    """Answers calls; those that are not named here are unimplemented.

    Args:
        server: What answers.
        access: Who may ask.
    """

    def __init__(self, server: Server, access: Access) -> None:
        self._server, self._access = server, access

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
        specs = version.find_specs(signature)
        check_names(request.inputs, specs)
        for name, spec in specs.items():
            _check_tensor(name, request.inputs[name], spec)
        # A few bytes can stand for any number of equal values: nothing is filled before this.
        shapes = {name: _read_shape(request.inputs[name]) for name in specs}
        limits = self._server.limits
        cost = version.find_cost(signature).measure_shapes(shapes, limits.request)
        size = max(request.ByteSize(), 8 * cost.values)
        inputs = await self._server.builder.run(
            size, _read_inputs, request.inputs, version, signature, limits.body_bytes
        )
        outputs = await self._server.batcher.call(version, signature, inputs)
        names = list(request.output_filter) or list(outputs)
        if unknown := [name[:100] for name in names if name not in outputs][:1]:
            raise RequestError(f"output_filter names {unknown}; allowed: {', '.join(outputs)}")
        return await self._server.builder.run(
            8 * sum(value.size for value in outputs.values()),
            _build_answer, _build_spec(version, signature), {n: outputs[n] for n in names},
        )  # fmt: skip

    def _describe(self, request: GetModelMetadataRequest) -> GetModelMetadataResponse:
        if list(request.metadata_field) != [SIGNATURES]:
            raise RequestError(f"metadata_field must be [{SIGNATURES}]")
        version = self._find(request.model_spec)
        answer = GetModelMetadataResponse(model_spec=_build_spec(version))
        found = SignatureDefMap(signature_def=version.saved_signatures)
        answer.metadata[SIGNATURES].Pack(found)
        return answer

    def _find(self, spec: ModelSpec) -> ServedVersion:
        if spec.version_label:
            raise RequestError("versions have no labels here; name a version, or none", NOT_FOUND)
        number = str(spec.version.value) if spec.HasField("version") else None
        return self._server.store.get(spec.name, number)

    async def _answer(
        self, method: str, context: Any, answer: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Answers a call, whatever becomes of it, and counts it."""
        start, status, message = time.monotonic(), 200, ""
        seconds = self._server.limits.seconds
        try:
            self._check_token(context)
            return await asyncio.wait_for(answer(), 2 * seconds)
        except RequestError as error:
            status, message = error.status, error.message
            forget_frames(error)
        except TimeoutError as error:
            status, message = EXPIRED, f"not answered within {seconds:g} s"
            forget_frames(error)
        except Exception:
            _log.exception("a call failed")
            status, message = FAILED, "the server could not answer; its log says why"
        finally:
            self._server.metrics.requests.labels(method, str(status)).inc()
            self._server.metrics.seconds.labels(method).observe(time.monotonic() - start)
        await context.abort(CODES.get(status, grpc.StatusCode.INTERNAL), message)
        raise AssertionError("a call that is aborted does not go on")

    def _check_token(self, context: Any) -> None:
        given = {str(name): value for name, value in context.invocation_metadata() or ()}
        if not self._access.allows_token(given.get("authorization")):
            raise RequestError("a call needs the metadata authorization: Bearer TOKEN", NO_TOKEN)


def _build_spec(version: ServedVersion, signature: str = "") -> ModelSpec:
    spec = ModelSpec(name=version.name, signature_name=signature)
    spec.version.value = version.number
    return spec


def _build_answer(spec: ModelSpec, outputs: Arrays) -> PredictResponse:
    answer = PredictResponse(model_spec=spec)
    for name, values in outputs.items():
        answer.outputs[name].CopyFrom(tf.make_tensor_proto(values))
    return answer


def _read_shape(tensor: Any) -> list[int]:
    return [dimension.size for dimension in tensor.tensor_shape.dim]


def _check_tensor(name: str, tensor: Any, spec: tf.TensorSpec) -> None:
    """Refuses a tensor of another type or shape than an input has.

    Raises:
        RequestError: It is one.
    """
    if len(tensor.tensor_shape.dim) > MOST_AXES:
        _refuse(name, spec, f"{len(tensor.tensor_shape.dim)} axes")
    shape = _read_shape(tensor)
    known = not tensor.tensor_shape.unknown_rank and min(shape, default=0) >= 0
    if tensor.dtype != spec.dtype.as_datatype_enum or not known:
        _refuse(name, spec, f"type {tensor.dtype} of shape {shape}")
    if not spec.shape.is_compatible_with(shape):
        _refuse(name, spec, f"shape {shape}")


def _read_inputs(
    given: Mapping[str, Any], version: ServedVersion, signature: str, most_bytes: int
) -> Arrays:
    """Returns the inputs of a call.

    Args:
        given: Tensors by name, of the shapes and types of the signature.
        version: The version that is called.
        signature: Of the version.
        most_bytes: How long all texts may be together, as one may stand for many.

    Raises:
        RequestError: One does not decode, holds what the model cannot read, or is too long.
    """
    specs, about = version.find_specs(signature), version.find_inputs(signature)
    inputs = {name: _read_tensor(name, given[name]) for name in specs}
    for name, values in inputs.items():
        check_times(name, values, about.get(name))
    texts = [values for values in inputs.values() if values.dtype == object]
    check_count("bytes of text", sum(sum(map(len, one.ravel())) for one in texts), most_bytes)
    return inputs


def _read_tensor(name: str, tensor: Any) -> np.ndarray:
    try:
        values = np.asarray(tf.make_ndarray(tensor))
    except (TypeError, ValueError, IndexError) as error:
        raise RequestError(f"input {name} does not decode: {error}") from error
    check_finite(name, values)
    return values


def _refuse(name: str, spec: tf.TensorSpec, received: str) -> NoReturn:
    shape = [-1 if size is None else size for size in spec.shape]
    raise RequestError(
        f"input {name} must be {spec.dtype.name} (type {spec.dtype.as_datatype_enum}) of shape "
        f"{shape}; received {received}"
    )


@asynccontextmanager
async def run_service(
    server: Server, address: str, access: Access | None = None
) -> AsyncIterator[int]:
    """Answers calls while the block runs; those that have begun are answered before it ends.

    Args:
        server: What answers.
        address: `host:port`; port 0 takes any free one.
        access: Who may ask; its names of hosts are for browsers, which do not speak gRPC.

    Yields:
        The port.

    Raises:
        RuntimeError: The address is taken.
    """
    limits = server.limits
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_metadata_size", limits.connections.head_bytes),
        ("grpc.absolute_max_metadata_size", limits.connections.head_bytes),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.server_handshake_timeout_ms", round(limits.connections.head_seconds * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", round(limits.connections.write_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.connections.write_seconds * 1000)),
    ]
    found = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.calls.waiting)
    add_PredictionServiceServicer_to_server(PredictionService(server, access or Access()), found)
    port = found.add_insecure_port(address)
    await found.start()
    try:
        yield port
    finally:
        await found.stop(2 * server.limits.seconds)
