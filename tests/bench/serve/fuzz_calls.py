"""Calls by gRPC that are broken: odd shapes, types and names, and bytes that are no message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.serve.load import take_core

SHAPES: list[list[int]] = [
    [], [0], [1], [1], [1], [2], [1, 1], [1, 3], [2, 3], [0, 5], [-1], [1, -1], [1 << 40],
    [1 << 62, 4], [1] * 12, [1, 1 << 20], [3, 0, 2],
]  # fmt: skip
NAMES = ["", "x", "\x00", "ü" * 50, "serving_default", "examples", "items", "n" * 5000]
NUMBERS = [0, 1, -1, 101, 1003, 2**31, 2**63 - 1, -(2**63)]
FLOATS = [0.0, 1.5, -1e300, float("nan"), float("inf")]
TEXTS = [b"", b"F", b"x" * 3000, b"\xff\xfe", b"101"]
KINDS = (1, 2, 3, 7, 9, 10, 14, 19, 21, 23, 0, 99, 101)
"""Types of tensors: float, double, int32, text, int64, bool, …, none, unknown, a reference."""


def drive_calls(job: dict[str, Any]) -> dict[str, int]:
    """Makes broken calls, and counts the codes; in a process of its own.

    Args:
        job: `port`, `cards`: versions of models, `count` of calls.
    """
    import grpc

    from conf.artefacts.export import read_card

    take_core(1)
    rng = np.random.default_rng(11)
    cards = [read_card(Path(path)) for path in job["cards"]]
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(f"127.0.0.1:{job['port']}") as channel:
        for _ in range(job["count"]):
            service, method, message = build_call(cards, rng)
            call = channel.unary_unary(f"/tensorflow.serving.{service}/{method}")
            try:
                call(message, timeout=60)
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
    return dict(codes)


def build_call(cards: Sequence[dict[str, Any]], rng: np.random.Generator) -> tuple[str, str, bytes]:
    """Draws a call: its service, method and message.

    Args:
        cards: `export.json` of the models.
        rng: Source of the draws.
    """
    card = _choose(rng, cards)
    kind = rng.random()
    if kind < 0.5:
        method, request = "Predict", _build_predict(card, rng)
    elif kind < 0.8:
        method, request = _build_examples(card, rng)
    elif kind < 0.95:
        method, request = "MultiInference", _build_tasks(card, rng)
    else:
        method, request = _build_question(card, rng)
    service = "ModelService" if method == "GetModelStatus" else "PredictionService"
    return service, method, _damage(request.SerializeToString(), rng)


def _choose(rng: np.random.Generator, among: Sequence[Any]) -> Any:
    return among[int(rng.integers(len(among)))]


def _name_model(spec: Any, card: dict[str, Any], rng: np.random.Generator, signature: str) -> None:
    """Fills a `ModelSpec`; one in ten is of no model, version or label."""
    spec.name, spec.signature_name = card["name"], signature
    if rng.random() < 0.1:
        spec.name = _choose(rng, NAMES)
    if rng.random() < 0.1:
        spec.signature_name = _choose(rng, NAMES)
    if rng.random() < 0.1:
        spec.version.value = _choose(rng, NUMBERS)
    elif rng.random() < 0.05:
        spec.version_label = _choose(rng, NAMES)


def _build_predict(card: dict[str, Any], rng: np.random.Generator) -> Any:
    from tensorflow_serving.apis.predict_pb2 import PredictRequest

    request = PredictRequest()
    signature = _choose(rng, list(card["signatures"]))
    _name_model(request.model_spec, card, rng, signature)
    for item in card["signatures"][signature]["inputs"]:
        if rng.random() < 0.95:
            _fill_tensor(request.inputs[item["name"]], item, rng)
    if rng.random() < 0.1:
        _fill_tensor(request.inputs[_choose(rng, NAMES)], {"dtype": "int64"}, rng)
    if rng.random() < 0.1:
        outputs = [*card["signatures"][signature]["outputs"], *NAMES]
        names = [one["name"] if isinstance(one, dict) else one for one in outputs]
        request.output_filter.extend(_choose(rng, names) for _ in range(int(rng.integers(4))))
    return request


def _fill_tensor(tensor: Any, item: dict[str, Any], rng: np.random.Generator) -> None:
    """Fills a tensor; half of them as an input wants it, but for the shape of its lists."""
    dtype = {"string": 7, "int64": 9, "int32": 3, "float64": 2, "bool": 10}.get(item["dtype"], 1)
    is_list = bool(item.get("is_list")) or "means" in item
    shape = [1, int(rng.integers(0, 4))] if is_list else [1]
    if rng.random() < 0.2:
        dtype = _choose(rng, KINDS)
    if rng.random() < 0.2:
        shape = _choose(rng, SHAPES)
    tensor.dtype = dtype
    for size in shape:
        tensor.tensor_shape.dim.add().size = size
    tensor.tensor_shape.unknown_rank = rng.random() < 0.02
    if rng.random() < 0.1:
        tensor.tensor_content = rng.bytes(int(rng.integers(40)))
    count = int(np.prod([size for size in shape if 0 <= size < 100], initial=1))
    count = int(rng.integers(5)) if rng.random() < 0.2 else count
    tensor.int64_val.extend(_choose(rng, NUMBERS) for _ in range(count if dtype == 9 else 0))
    tensor.string_val.extend(_choose(rng, TEXTS) for _ in range(count if dtype == 7 else 0))
    tensor.int_val.extend(int(rng.integers(99)) for _ in range(count if dtype == 3 else 0))
    tensor.float_val.extend(_choose(rng, FLOATS) for _ in range(count if dtype == 1 else 0))
    tensor.double_val.extend(_choose(rng, FLOATS) for _ in range(count if dtype == 2 else 0))


def _build_examples(card: dict[str, Any], rng: np.random.Generator) -> tuple[str, Any]:
    from tensorflow_serving.apis.classification_pb2 import ClassificationRequest
    from tensorflow_serving.apis.regression_pb2 import RegressionRequest

    method, kind, signature = _choose(rng, [
        ("Classify", ClassificationRequest, "classify"), ("Regress", RegressionRequest, "regress"),
    ])  # fmt: skip
    request = kind()
    _name_model(request.model_spec, card, rng, _choose(rng, [signature, ""]))
    _fill_input(request.input, card, rng)
    return method, request


def _fill_input(given: Any, card: dict[str, Any], rng: np.random.Generator) -> None:
    found = given.example_list
    if rng.random() < 0.3:
        found = given.example_list_with_context
        _fill_example(found.context, card, rng)
    for _ in range(int(rng.integers(4))):
        _fill_example(found.examples.add(), card, rng)


def _fill_example(example: Any, card: dict[str, Any], rng: np.random.Generator) -> None:
    named = {item["name"]: item for one in card["signatures"].values() for item in one["inputs"]}
    for name in [*named, *NAMES]:
        if rng.random() > (0.7 if name in named else 0.03):
            continue
        feature = example.features.feature[name]
        length = int(rng.integers(4)) if rng.random() < 0.3 else 1
        is_text = named.get(name, {}).get("dtype") == "string"
        kind = rng.integers(3) if rng.random() < 0.2 else (0 if is_text else 1)
        if kind == 0:
            feature.bytes_list.value.extend(_choose(rng, TEXTS) for _ in range(length))
        elif kind == 1:
            feature.int64_list.value.extend(_choose(rng, NUMBERS) for _ in range(length))
        else:
            feature.float_list.value.extend(_choose(rng, FLOATS) for _ in range(length))


def _build_tasks(card: dict[str, Any], rng: np.random.Generator) -> Any:
    from tensorflow_serving.apis.inference_pb2 import MultiInferenceRequest

    request = MultiInferenceRequest()
    _fill_input(request.input, card, rng)
    for _ in range(int(rng.integers(4))):
        signature = _choose(rng, ["classify", "regress", "", *card["signatures"]])
        task = request.tasks.add()
        _name_model(task.model_spec, card, rng, signature)
        method = signature if rng.random() < 0.8 else _choose(rng, NAMES)
        task.method_name = f"tensorflow/serving/{method}"
    return request


def _build_question(card: dict[str, Any], rng: np.random.Generator) -> tuple[str, Any]:
    from tensorflow_serving.apis.get_model_metadata_pb2 import GetModelMetadataRequest
    from tensorflow_serving.apis.get_model_status_pb2 import GetModelStatusRequest

    if rng.random() < 0.5:
        status = GetModelStatusRequest()
        _name_model(status.model_spec, card, rng, "")
        return "GetModelStatus", status
    request = GetModelMetadataRequest()
    _name_model(request.model_spec, card, rng, "")
    request.metadata_field.append(_choose(rng, ["signature_def", *NAMES]))
    return "GetModelMetadata", request


def _damage(message: bytes, rng: np.random.Generator) -> bytes:
    """Returns a message as it is, cut, or with some bytes changed."""
    kind = rng.random()
    if kind < 0.7 or not message:
        return message
    if kind < 0.85:
        return message[: int(rng.integers(len(message)))]
    changed = np.frombuffer(message, np.uint8).copy()
    for _ in range(int(rng.integers(1, 5))):
        changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
    return changed.tobytes()
