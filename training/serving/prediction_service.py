"""TensorFlow Serving's gRPC services: `PredictionService`, and `GetModelStatus` of `ModelService`.

Requests are answered by the same versions, batches and limits as those of the REST API. Codes and
messages of what both servers refuse are TensorFlow Serving's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis.classification_pb2 import (
    ClassificationRequest,
    ClassificationResponse,
    ClassificationResult,
)
from tensorflow_serving.apis.get_model_metadata_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    SignatureDefMap,
)
from tensorflow_serving.apis.get_model_status_pb2 import (
    GetModelStatusRequest,
    GetModelStatusResponse,
)
from tensorflow_serving.apis.inference_pb2 import (
    InferenceTask,
    MultiInferenceRequest,
    MultiInferenceResponse,
)
from tensorflow_serving.apis.input_pb2 import Input
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.model_service_pb2_grpc import (
    ModelServiceServicer,
    add_ModelServiceServicer_to_server,
)
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
from tensorflow_serving.apis.prediction_service_pb2_grpc import (
    PredictionServiceServicer,
    add_PredictionServiceServicer_to_server,
)
from tensorflow_serving.apis.regression_pb2 import (
    RegressionRequest,
    RegressionResponse,
    RegressionResult,
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
from training.serving.limits import check_count, check_example_bytes
from training.serving.model_store import METHOD_PREFIX, METHOD_WORDS, ServedVersion
from training.serving.tensors import Arrays, check_finite, check_times

CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    NO_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
SIGNATURES, DEFAULT = "signature_def", "serving_default"
STREAMS, IDLE_SECONDS = 256, 300.0
"""Calls of a connection at a time; until one without a call is closed."""
NO_SPEC, NO_NAME = "Missing ModelSpec", "ModelSpec has no name specified."
FIELDS = 100
"""Fields of metadata that a call may ask for, of which there is one."""
SHOWN = 3
"""Unknown names of inputs that a message says."""
MOST_AXES = 8
"""Axes of a tensor whose shape is looked at."""

AnswerT = TypeVar("AnswerT")

_log = logging.getLogger("sluice.training.serving")


class CallError(RequestError):
    """A call that TensorFlow Serving refuses with a code that the REST API has no status for.

    Attributes:
        code: The code.
    """

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class PredictionService(PredictionServiceServicer, ModelServiceServicer):
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

    async def Classify(  # noqa: N802  The API's name.
        self, request: ClassificationRequest, context: Any
    ) -> ClassificationResponse:
        """Returns classes with their scores, for each Example."""

        async def answer() -> ClassificationResponse:
            version, outputs = await self._call_examples(request, "classify")
            spec = _build_spec(version, request.model_spec.signature_name)
            return ClassificationResponse(model_spec=spec, result=_build_classes(outputs))

        return await self._answer("grpc_classify", context, answer)

    async def Regress(  # noqa: N802  The API's name.
        self, request: RegressionRequest, context: Any
    ) -> RegressionResponse:
        """Returns a value for each Example."""

        async def answer() -> RegressionResponse:
            version, outputs = await self._call_examples(request, "regress")
            spec = _build_spec(version, request.model_spec.signature_name)
            return RegressionResponse(model_spec=spec, result=_build_values(outputs))

        return await self._answer("grpc_regress", context, answer)

    async def MultiInference(  # noqa: N802  The API's name.
        self, request: MultiInferenceRequest, context: Any
    ) -> MultiInferenceResponse:
        """Classifies and regresses the same Examples."""
        return await self._answer("grpc_multi_inference", context, lambda: self._infer(request))

    async def GetModelMetadata(  # noqa: N802  The API's name.
        self, request: GetModelMetadataRequest, context: Any
    ) -> GetModelMetadataResponse:
        """Returns the signatures of a version."""

        async def answer() -> GetModelMetadataResponse:
            return self._describe(request)

        return await self._answer("grpc_metadata", context, answer)

    async def GetModelStatus(  # noqa: N802  The API's name.
        self, request: GetModelStatusRequest, context: Any
    ) -> GetModelStatusResponse:
        """Returns the states of a model's versions."""

        async def answer() -> GetModelStatusResponse:
            states = self._server.store.describe(*_read_spec(request))
            return json_format.ParseDict(states, GetModelStatusResponse())

        return await self._answer("grpc_status", context, answer)

    async def _predict(self, request: PredictRequest) -> PredictResponse:
        version = self._server.store.get(*_read_spec(request))
        signature = request.model_spec.signature_name or DEFAULT
        if signature not in version.signatures:
            raise CallError(
                f'Serving signature key "{signature[:100]}" not found.',
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        specs = version.find_specs(signature)
        _check_inputs(request.inputs, specs)
        names = _choose_outputs(request.output_filter, version, signature)
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
        return await self._server.builder.run(
            8 * sum(value.size for value in outputs.values()),
            _build_answer, _build_spec(version, signature), {n: outputs[n] for n in names},
        )  # fmt: skip

    async def _call_examples(
        self, request: ClassificationRequest | RegressionRequest, method: str
    ) -> tuple[ServedVersion, Arrays]:
        """Calls a signature for the Examples of a request."""
        version = self._server.store.get(*_read_spec(request))
        signature = request.model_spec.signature_name or method
        version.require_method(signature, method)
        examples = await self._read_examples(request.input)
        return version, await self._server.batcher.call(version, signature, {"inputs": examples})

    async def _read_examples(self, given: Input) -> np.ndarray:
        """Returns serialized Examples, each with what all of them have.

        Raises:
            RequestError: There are none, or they are more than a request may have.
        """
        kind = given.WhichOneof("kind")
        found = getattr(given, kind) if kind is not None else None
        if found is None or not found.examples:
            raise RequestError("Input is empty.")
        limits = self._server.limits.request
        check_count("rows", len(found.examples), limits.rows)
        shared = found.context.ByteSize() if kind == "example_list_with_context" else 0
        longest = shared + max(example.ByteSize() for example in found.examples)
        check_example_bytes(len(found.examples), longest, limits)
        size = given.ByteSize() + shared * len(found.examples)
        return await self._server.builder.run(size, _serialize, found, bool(shared))

    async def _infer(self, request: MultiInferenceRequest) -> MultiInferenceResponse:
        if not request.tasks:
            raise RequestError(NO_NAME)
        name = request.tasks[0].model_spec.name
        version = self._server.store.get(*_read_spec(request.tasks[0]))
        methods: dict[str, str] = {}
        for task in request.tasks:
            _check_task(task, name, version, methods)
        examples = await self._read_examples(request.input)
        answer = MultiInferenceResponse()
        for task, (signature, method) in zip(request.tasks, methods.items(), strict=True):
            outputs = await self._server.batcher.call(version, signature, {"inputs": examples})
            result = answer.results.add(
                model_spec=_build_spec(version, task.model_spec.signature_name)
            )
            if method == "classify":
                result.classification_result.CopyFrom(_build_classes(outputs))
            else:
                result.regression_result.CopyFrom(_build_values(outputs))
        return answer

    def _describe(self, request: GetModelMetadataRequest) -> GetModelMetadataResponse:
        if not request.HasField("model_spec"):
            raise RequestError(NO_SPEC)
        if not request.metadata_field:
            raise RequestError("GetModelMetadataRequest must specify at least one metadata_field")
        check_count("metadata fields", len(request.metadata_field), FIELDS)
        for name in request.metadata_field:
            if name != SIGNATURES:
                raise RequestError(f"Metadata field {name[:100]} is not supported")
        version = self._server.store.get(*_read_spec(request))
        answer = GetModelMetadataResponse(model_spec=_build_spec(version))
        found = SignatureDefMap(signature_def=version.saved_signatures)
        answer.metadata[SIGNATURES].Pack(found)
        return answer

    async def _answer(
        self, method: str, context: Any, answer: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Answers a call, whatever becomes of it, and counts it."""
        start, status, message, code = time.monotonic(), 200, "", None
        seconds = self._server.limits.seconds
        try:
            self._check_token(context)
            return await asyncio.wait_for(answer(), 2 * seconds)
        except RequestError as error:
            status, message, code = error.status, error.message, getattr(error, "code", None)
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
        await context.abort(code or CODES.get(status, grpc.StatusCode.INTERNAL), message)
        raise AssertionError("a call that is aborted does not go on")

    def _check_token(self, context: Any) -> None:
        given = {str(name): value for name, value in context.invocation_metadata() or ()}
        if not self._access.allows_token(given.get("authorization")):
            raise RequestError("a call needs the metadata authorization: Bearer TOKEN", NO_TOKEN)


def _read_spec(request: Any) -> tuple[str, str | None, str]:
    """Returns the model, version and label that a request names.

    Raises:
        RequestError: It names no model.
    """
    if not request.HasField("model_spec"):
        raise RequestError(NO_SPEC)
    spec = request.model_spec
    if not spec.name:
        raise RequestError(NO_NAME)
    number = str(spec.version.value) if spec.HasField("version") else None
    return spec.name, number, spec.version_label


def _check_inputs(given: Mapping[str, Any], specs: Mapping[str, tf.TensorSpec]) -> None:
    """Refuses names of inputs that are not those of the signature.

    Raises:
        RequestError: An input is missing, or unknown.
    """
    if given.keys() == specs.keys():
        return
    if len(given) == len(specs):
        unknown = next(name for name in given if name not in specs)
        raise RequestError(
            f"input tensor alias not found in signature: {unknown[:100]}. Inputs expected to be in "
            f"the set {{{','.join(sorted(specs))}}}."
        )
    # A message may hold any number of names: a few are looked at and said.
    unknown_names = list(islice((name[:100] for name in given if name not in specs), SHOWN + 1))
    extra = ",".join(sorted(unknown_names[:SHOWN])) + (",…" if len(unknown_names) > SHOWN else "")
    missing = ",".join(sorted(name for name in specs if name not in given))
    raise RequestError(
        f"input size does not match signature: {len(given)}!={len(specs)}. Sent extra: {{{extra}}}."
        f" Missing but required: {{{missing}}}."
    )


def _choose_outputs(wanted: Sequence[str], version: ServedVersion, signature: str) -> Sequence[str]:
    """Returns the outputs that are answered: all, where none is named.

    Raises:
        RequestError: One is unknown, or named twice.
    """
    outputs = version.saved_signatures[signature].outputs
    seen: set[str] = set()
    for name in wanted:
        if name not in outputs:
            raise RequestError(
                f"output tensor alias not found in signature: {name[:100]} Outputs expected to be "
                f"in the set {{{','.join(sorted(outputs))}}}."
            )
        if name in seen:
            raise RequestError(f"duplicate output tensor alias: {name}")
        seen.add(name)
    return list(wanted) or list(outputs)


def _serialize(found: Any, has_context: bool) -> np.ndarray:
    """Returns Examples, `[rows]` of bytes; what one says itself stands behind the context."""
    shared = found.context.SerializeToString() if has_context else b""
    return np.array([shared + one.SerializeToString() for one in found.examples], dtype=object)


def _check_task(
    task: InferenceTask, name: str, version: ServedVersion, methods: dict[str, str]
) -> None:
    """Adds the signature of a task and its method to those of the tasks before.

    Raises:
        RequestError: It names no model, another one, or a signature that cannot be called so.
    """
    if not task.model_spec.name:
        raise RequestError("Found ModelSpec with an empty model name.")
    if task.model_spec.name != name:
        raise RequestError(
            "All ModelSpecs in a MultiInferenceRequest must access the same model name."
        )
    method = task.method_name.removeprefix(METHOD_PREFIX)
    if method not in METHOD_WORDS or not task.method_name.startswith(METHOD_PREFIX):
        raise CallError(
            f"Unsupported signature method_name: {task.method_name[:100]}",
            grpc.StatusCode.UNIMPLEMENTED,
        )
    signature = task.model_spec.signature_name or method
    if signature in methods:
        raise RequestError(f"Duplicate evaluation of signature: {signature[:100]}")
    if signature not in version.signatures:
        raise RequestError(f"Requested signature not found in model graph: {signature[:100]}")
    version.require_method(signature, method)
    methods[signature] = method


def _build_classes(outputs: Arrays) -> ClassificationResult:
    """Builds the result of `classify`, of classes and their scores, both `[rows, classes]`."""
    result = ClassificationResult()
    for labels, scores in zip(outputs["classes"], outputs["scores"].tolist(), strict=True):
        row = result.classifications.add()
        for label, score in zip(labels, scores, strict=True):
            row.classes.add(label=label.decode(), score=score)
    return result


def _build_values(outputs: Arrays) -> RegressionResult:
    """Builds the result of `regress`, of values `[rows]`."""
    result = RegressionResult()
    for value in outputs["outputs"].tolist():
        result.regressions.add(value=value)
    return result


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
        ("grpc.max_allowed_incoming_connections", limits.connections.count),
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
    service = PredictionService(server, access or Access())
    add_PredictionServiceServicer_to_server(service, found)
    add_ModelServiceServicer_to_server(service, found)
    port = found.add_insecure_port(address)
    await found.start()
    try:
        yield port
    finally:
        await found.stop(2 * server.limits.seconds)
