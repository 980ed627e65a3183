"""TensorFlow Serving's gRPC services: `PredictionService`, and `GetModelStatus` of `ModelService`.

Requests are answered by the same versions, batches and limits as those of the REST API. Codes and
messages of what both servers refuse are TensorFlow Serving's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NoReturn

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
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
from tensorflow_serving.apis.regression_pb2 import (
    RegressionRequest,
    RegressionResponse,
    RegressionResult,
)

from conf.artefacts.export import DEFAULT_SIGNATURE
from training.raw_inputs.json_values import check_finite, check_times
from training.serving.access import Access
from training.serving.calls import CallError, Calls
from training.serving.models.served_version import METHOD_PREFIX, METHOD_WORDS, ServedVersion
from training.serving.requests.errors import RequestError, refuse_values
from training.serving.requests.examples import serialize_examples
from training.serving.requests.limits import (
    AGE_SECONDS,
    FIELDS,
    IDLE_SECONDS,
    MOST_AXES,
    STREAMS,
    check_count,
    check_example_bytes,
)
from training.serving.requests.tensors import Arrays
from training.serving.server import Server

SIGNATURES = "signature_def"
NO_SPEC, NO_NAME = "Missing ModelSpec", "ModelSpec has no name specified."
SHOWN = 3
"""Unknown names of inputs that a message says."""


class PredictionService:
    """Answers calls; those that are not named here are unimplemented.

    Args:
        server: What answers.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def build_handlers(self, calls: Calls) -> list[grpc.GenericRpcHandler]:
        """Builds the services.

        Args:
            calls: Takes the calls.
        """
        build = calls.build_method
        predictions = {
            "Predict": build("grpc_predict", PredictRequest, self._predict),
            "Classify": build("grpc_classify", ClassificationRequest, self._classify),
            "Regress": build("grpc_regress", RegressionRequest, self._regress),
            "MultiInference": build("grpc_multi_inference", MultiInferenceRequest, self._infer),
            "GetModelMetadata": build("grpc_metadata", GetModelMetadataRequest, self._describe),
        }
        models = {"GetModelStatus": build("grpc_status", GetModelStatusRequest, self._find_states)}
        services = {"PredictionService": predictions, "ModelService": models}
        return [
            grpc.method_handlers_generic_handler(f"tensorflow.serving.{name}", methods)
            for name, methods in services.items()
        ]

    async def _classify(self, request: ClassificationRequest) -> ClassificationResponse:
        """Returns classes with their scores, for each Example."""
        version, outputs = await self._call_examples(request, "classify")
        spec = _build_spec(version, request.model_spec.signature_name)
        return ClassificationResponse(model_spec=spec, result=_build_classes(outputs))

    async def _regress(self, request: RegressionRequest) -> RegressionResponse:
        """Returns a value for each Example."""
        version, outputs = await self._call_examples(request, "regress")
        spec = _build_spec(version, request.model_spec.signature_name)
        return RegressionResponse(model_spec=spec, result=_build_values(outputs))

    async def _find_states(self, request: GetModelStatusRequest) -> GetModelStatusResponse:
        """Returns the states of a model's versions."""
        states = self._server.store.describe(*_read_spec(request))
        return json_format.ParseDict(states, GetModelStatusResponse())

    async def _predict(self, request: PredictRequest) -> PredictResponse:
        """Calls a signature."""
        version = self._server.store.get(*_read_spec(request))
        signature = request.model_spec.signature_name or DEFAULT_SIGNATURE
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
        examples = await self._read_examples(request.input, version, signature)
        return version, await self._server.batcher.call(version, signature, {"inputs": examples})

    async def _read_examples(
        self, given: Input, version: ServedVersion, signature: str
    ) -> np.ndarray:
        """Returns serialized Examples, each with what all of them have, by the inputs' names.

        Raises:
            RequestError: There are none, or they are more than a request may have.
        """
        kind = given.WhichOneof("kind")
        examples = getattr(given, kind) if kind is not None else None
        if examples is None or not examples.examples:
            raise RequestError("Input is empty.")
        limits = self._server.limits.request
        check_count("rows", len(examples.examples), limits.rows)
        shared = examples.context.ByteSize() if kind == "example_list_with_context" else 0
        longest = shared + max(example.ByteSize() for example in examples.examples)
        check_example_bytes(len(examples.examples), longest, limits)
        size = given.ByteSize() + shared * len(examples.examples)
        holds = version.find_inputs(signature)["inputs"]["holds"]
        return await self._server.builder.run(size, serialize_examples, examples, holds)

    async def _infer(self, request: MultiInferenceRequest) -> MultiInferenceResponse:
        """Classifies and regresses the same Examples."""
        if not request.tasks:
            raise RequestError(NO_NAME)
        name = request.tasks[0].model_spec.name
        version = self._server.store.get(*_read_spec(request.tasks[0]))
        methods: dict[str, str] = {}
        for task in request.tasks:
            _check_task(task, name, version, methods)
        first = next(iter(methods))
        examples = await self._read_examples(request.input, version, first)
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

    async def _describe(self, request: GetModelMetadataRequest) -> GetModelMetadataResponse:
        """Returns the signatures of a version."""
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
        definitions = SignatureDefMap(signature_def=version.saved_signatures)
        answer.metadata[SIGNATURES].Pack(definitions)
        return answer


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


@refuse_values()
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
    if values.dtype == object and not tensor.string_val:  # TensorFlow fills it with str.
        values = np.full(values.shape, b"", object)
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
    server: Server, address: str, access: Access | None = None, *, shares_port: bool = False
) -> AsyncIterator[int]:
    """Answers calls while the block runs; those that have begun are answered before it ends.

    Args:
        server: What answers.
        address: `host:port`; port 0 takes any free one.
        access: Who may ask; its names of hosts are for browsers, which do not speak gRPC.
        shares_port: Whether other processes answer at the same port.

    Yields:
        The port.

    Raises:
        RuntimeError: The address is taken.
    """
    limits = server.limits
    options = [
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_allowed_incoming_connections", limits.connections.count),
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_metadata_size", limits.connections.head_bytes),
        ("grpc.absolute_max_metadata_size", limits.connections.head_bytes),
        # A few bytes can be compressed from a gigabyte: plain messages alone (bit 0).
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.server_handshake_timeout_ms", round(limits.connections.head_seconds * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        # A client that does not read its answers ends with its connection; others open another.
        ("grpc.max_connection_age_ms", round(AGE_SECONDS * 1000)),
        ("grpc.max_connection_age_grace_ms", round(2 * limits.seconds * 1000)),
        ("grpc.keepalive_time_ms", round(limits.connections.write_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.connections.write_seconds * 1000)),
    ]
    # Most may have no message yet; those that have one are not refused for them.
    grpc_server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4 * limits.calls.waiting)
    calls = Calls(server, access or Access())
    grpc_server.add_generic_rpc_handlers(PredictionService(server).build_handlers(calls))
    port = grpc_server.add_insecure_port(address)
    await grpc_server.start()
    try:
        yield port
    finally:
        await grpc_server.stop(2 * server.limits.seconds)
