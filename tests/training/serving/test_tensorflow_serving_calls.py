"""Calls as clients of TensorFlow Serving make them: its messages, codes and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from grpc import StatusCode
from grpc.aio import AioRpcError, insecure_channel
from tensorflow_serving.apis.classification_pb2 import ClassificationRequest
from tensorflow_serving.apis.get_model_metadata_pb2 import GetModelMetadataRequest
from tensorflow_serving.apis.get_model_status_pb2 import GetModelStatusRequest, ModelVersionStatus
from tensorflow_serving.apis.inference_pb2 import MultiInferenceRequest
from tensorflow_serving.apis.input_pb2 import Input
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.model_service_pb2_grpc import ModelServiceStub
from tensorflow_serving.apis.predict_pb2 import PredictRequest
from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub
from tensorflow_serving.apis.regression_pb2 import RegressionRequest

from training.serving.prediction_service import run_service

CLASSIFY, REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"
ROWS: list[dict[str, Any]] = [
    {"user_id": 1003, "gender": "F", "history": [101, 105], "movie_id": 107, "genres": ["genre_3"]},
    {"user_id": 1004, "gender": "M", "history": [], "movie_id": 110, "genres": ["genre_2"]},
]


def build_example(row: dict[str, Any]) -> tf.train.Example:
    example = tf.train.Example()
    for name, value in row.items():
        values = value if isinstance(value, list) else [value]
        texts = [one.encode() for one in values if isinstance(one, str)]
        feature = example.features.feature[name]
        if texts:
            feature.bytes_list.value.extend(texts)
        else:
            feature.int64_list.value.extend(values)
    return example


def build_input(rows: list[dict[str, Any]], context: dict[str, Any] | None = None) -> Input:
    examples = [build_example(row) for row in rows]
    given = Input()
    if context is None:
        given.example_list.examples.extend(examples)
    else:
        given.example_list_with_context.examples.extend(examples)
        given.example_list_with_context.context.CopyFrom(build_example(context))
    return given


def spec(name: str = "scores", signature: str = "", **changes: Any) -> ModelSpec:
    found = ModelSpec(name=name, signature_name=signature)
    if "label" in changes:
        found.version_label = changes["label"]
    if "version" in changes:
        found.version.value = changes["version"]
    return found


@pytest.fixture(scope="module")
def call(server) -> Callable[..., Any]:
    """Returns what calls a method: its answer, or code and details of its refusal."""

    async def ask(method: str, requests: list[Any]) -> list[Any]:
        found: list[Any] = []
        service = run_service(server, "127.0.0.1:0")
        async with service as port, insecure_channel(f"127.0.0.1:{port}") as channel:
            kind = ModelServiceStub if method == "GetModelStatus" else PredictionServiceStub
            stub = kind(channel)
            for request in requests:
                try:
                    found.append(await getattr(stub, method)(request))
                except AioRpcError as error:
                    found.append((error.code(), error.details()))
        return found

    return lambda method, *requests: asyncio.run(ask(method, list(requests)))


@pytest.fixture(scope="module")
def expected(client) -> dict[str, list[Any]]:
    """What the REST API says of the same rows."""
    rows = [{**row, "history": row["history"] or None} for row in ROWS]
    return {
        method: client.post(f"/v1/models/scores:{method}", json={"examples": rows}).json()[
            "results"
        ]
        for method in ("classify", "regress")
    }


def test_examples_are_classified_and_regressed(call, expected) -> None:
    shared = {"user_id": 1003, "gender": "F", "history": [101, 105]}
    rest = [{name: ROWS[0][name] for name in ("movie_id", "genres")}, ROWS[1]]
    for given in (build_input(ROWS), build_input(rest, shared)):
        [classes] = call("Classify", ClassificationRequest(model_spec=spec(), input=given))
        assert classes.model_spec.name == "scores"
        assert classes.model_spec.version.value == 1
        found = [
            [[one.label, pytest.approx(one.score, abs=1e-6)] for one in row.classes]
            for row in classes.result.classifications
        ]
        assert found == expected["classify"]
        assert found[0][0][0] == "click"
        named = spec(signature="regress", version=1)
        [values] = call("Regress", RegressionRequest(model_spec=named, input=given))
        assert values.model_spec.signature_name == "regress"
        scores = [one.value for one in values.result.regressions]
        np.testing.assert_allclose(scores, expected["regress"], atol=1e-6)
    assert expected["regress"][0] != expected["regress"][1]


def build_tasks(*tasks: tuple[ModelSpec, str], rows: Any = ROWS) -> MultiInferenceRequest:
    request = MultiInferenceRequest(input=build_input(rows))
    for one, method in tasks:
        request.tasks.add(model_spec=one, method_name=method)
    return request


def test_several_inferences_of_the_same_examples(call, expected) -> None:
    both = ((spec(signature="classify"), CLASSIFY), (spec(signature="regress"), REGRESS))
    [answer] = call("MultiInference", build_tasks(*both))
    first, second = answer.results
    assert [one.model_spec.signature_name for one in answer.results] == ["classify", "regress"]
    assert first.model_spec.version.value == 1
    scores = [row.classes[0].score for row in first.classification_result.classifications]
    np.testing.assert_allclose(scores, [row[0][1] for row in expected["classify"]], atol=1e-6)
    values = [one.value for one in second.regression_result.regressions]
    np.testing.assert_allclose(values, expected["regress"], atol=1e-6)


INVALID = StatusCode.INVALID_ARGUMENT
REFUSED: list[tuple[str, Any, StatusCode, str]] = [
    ("Classify", ClassificationRequest(), INVALID, "Missing ModelSpec"),
    ("Classify", ClassificationRequest(model_spec=ModelSpec()), INVALID,
     "ModelSpec has no name specified."),
    ("Classify", ClassificationRequest(model_spec=spec()), INVALID, "Input is empty."),
    ("Classify", ClassificationRequest(model_spec=spec(), input=build_input([])), INVALID,
     "Input is empty."),
    ("Classify", ClassificationRequest(model_spec=spec(signature="no")), INVALID,
     "No signature was found with the name: no"),
    ("Classify", ClassificationRequest(model_spec=spec(signature="serving_default")), INVALID,
     "Expected classification signature method_name to be tensorflow/serving/classify. "
     "Was: tensorflow/serving/predict"),
    ("Regress", RegressionRequest(model_spec=spec(signature="classify")), INVALID,
     "Expected regression signature method_name to be tensorflow/serving/regress. "
     "Was: tensorflow/serving/classify"),
    ("Regress", RegressionRequest(model_spec=spec("none")), StatusCode.NOT_FOUND,
     "Servable not found for request: Latest(none)"),
    ("Regress", RegressionRequest(model_spec=spec(version=9)), StatusCode.NOT_FOUND,
     "Servable not found for request: Specific(scores, 9)"),
    ("Regress", RegressionRequest(model_spec=spec(label="stable")), INVALID,
     "Unrecognized servable version label: stable"),
    ("Regress", RegressionRequest(model_spec=spec(), input=build_input(ROWS * 40)), INVALID,
     "a request may have 64 rows; received 80"),
    ("Regress", RegressionRequest(
        model_spec=spec(), input=build_input([{}] * 64, {"gender": "x" * 150_000})), INVALID,
     "a request may have 250000 values (rows x bytes of the longest Example / 32)"),
    ("Predict", PredictRequest(), INVALID, "Missing ModelSpec"),
    ("Predict", PredictRequest(model_spec=spec(signature="no")), StatusCode.FAILED_PRECONDITION,
     'Serving signature key "no" not found.'),
    ("Predict", PredictRequest(model_spec=spec(signature="examples")), INVALID,
     "input size does not match signature: 0!=1. Sent extra: {}. "
     "Missing but required: {examples}."),
    ("Predict", PredictRequest(model_spec=spec(signature="examples"),
                               inputs={"x": tf.make_tensor_proto([b""])}), INVALID,
     "input tensor alias not found in signature: x. Inputs expected to be in the set {examples}."),
    ("Predict", PredictRequest(model_spec=spec(signature="examples"), output_filter=["x"],
                               inputs={"examples": tf.make_tensor_proto([b""])}), INVALID,
     "output tensor alias not found in signature: x Outputs expected to be in the set "
     "{click,value}."),
    ("Predict", PredictRequest(model_spec=spec(signature="examples"), output_filter=["click"] * 2,
                               inputs={"examples": tf.make_tensor_proto([b""])}), INVALID,
     "duplicate output tensor alias: click"),
    ("MultiInference", MultiInferenceRequest(), INVALID, "ModelSpec has no name specified."),
    ("MultiInference", build_tasks((spec(), CLASSIFY), (spec(), CLASSIFY)), INVALID,
     "Duplicate evaluation of signature: classify"),
    ("MultiInference", build_tasks((spec(), CLASSIFY), (spec("towers"), REGRESS)), INVALID,
     "All ModelSpecs in a MultiInferenceRequest must access the same model name."),
    ("MultiInference", build_tasks((spec(signature="no"), CLASSIFY)), INVALID,
     "Requested signature not found in model graph: no"),
    ("MultiInference", build_tasks((spec(), "tensorflow/serving/predict")),
     StatusCode.UNIMPLEMENTED,
     "Unsupported signature method_name: tensorflow/serving/predict"),
    ("GetModelMetadata", GetModelMetadataRequest(), INVALID, "Missing ModelSpec"),
    ("GetModelMetadata", GetModelMetadataRequest(model_spec=spec()), INVALID,
     "GetModelMetadataRequest must specify at least one metadata_field"),
    ("GetModelMetadata", GetModelMetadataRequest(model_spec=spec(), metadata_field=["x"]), INVALID,
     "Metadata field x is not supported"),
    ("GetModelMetadata", GetModelMetadataRequest(
        model_spec=spec(), metadata_field=["signature_def"] * 101), INVALID,
     "a request may have 100 metadata fields; received 101"),
    ("GetModelStatus", GetModelStatusRequest(), INVALID, "Missing ModelSpec"),
    ("GetModelStatus", GetModelStatusRequest(model_spec=spec("none")), StatusCode.NOT_FOUND,
     "Could not find any versions of model none"),
    ("GetModelStatus", GetModelStatusRequest(model_spec=spec(version=9)), StatusCode.NOT_FOUND,
     "Could not find version 9 of model scores"),
    ("GetModelStatus", GetModelStatusRequest(model_spec=spec(label="x")), INVALID,
     "Unrecognized servable version label: x"),
]  # fmt: skip


@pytest.mark.parametrize("method", sorted({method for method, *_ in REFUSED}))
def test_what_is_refused_has_tensorflow_serving_s_code_and_message(call, method) -> None:
    cases = [case for case in REFUSED if case[0] == method]
    answers = call(method, *(request for _, request, _, _ in cases))
    for (_, _, code, said), found in zip(cases, answers, strict=True):
        assert isinstance(found, tuple), said
        assert found[0] == code, found
        assert found[1].startswith(said), found


def test_bytes_that_are_no_example_and_numbers_that_are_not_finite_are_refused(call) -> None:
    broken = build_input([{**ROWS[0], "user_id": "text"}])
    [found] = call("Regress", RegressionRequest(model_spec=spec(), input=broken))
    assert found[0] == INVALID
    assert "user_id" in found[1]


def test_a_tensor_of_text_without_values_holds_empty_ones(call) -> None:
    empty = tf.make_tensor_proto([b""])
    bare = tf.make_tensor_proto([b""])
    del bare.string_val[:]
    named = spec(signature="examples")
    requests = [PredictRequest(model_spec=named, inputs={"examples": n}) for n in (empty, bare)]
    expected, found = call("Predict", *requests)
    assert found == expected
    assert tf.make_ndarray(found.outputs["click"]).shape == (1,)


def test_states_of_versions(call) -> None:
    one, both = call(
        "GetModelStatus",
        GetModelStatusRequest(model_spec=spec(version=1)),
        GetModelStatusRequest(model_spec=spec("towers")),
    )
    for answer in (one, both):
        [state] = answer.model_version_status
        assert (state.version, state.state) == (1, ModelVersionStatus.AVAILABLE)
        assert (state.status.error_code, state.status.error_message) == (0, "")


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("scores/labels/stable", 400, "Unrecognized servable version label: stable"),
        ("scores/labels/stable/metadata", 400, "Unrecognized servable version label: stable"),
        ("scores/versions/9", 404, "Could not find version 9 of model scores"),
        ("none", 404, "Could not find any versions of model none"),
        ("none/metadata", 404, "Servable not found for request: Latest(none)"),
        ("scores/versions/99999999999999999999", 400,
         "Failed to convert version: 99999999999999999999 to numeric."),
        ("scores/versions/x", 400, "Malformed request: GET /v1/models/scores/versions/x"),
        ("scores/versions/\u0661", 400,
         "Malformed request: GET /v1/models/scores/versions/\u0661"),
        ("scores/versions/1_0", 400, "Malformed request: GET /v1/models/scores/versions/1_0"),
    ],
)  # fmt: skip
def test_rest_errors_are_tensorflow_serving_s(client, path, status, said) -> None:
    answer = client.get(f"/v1/models/{path}")
    assert (answer.status_code, answer.json()) == (status, {"error": said})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/"), ("GET", "/v1/model"), ("GET", "/v1/models/"), ("GET", "/v1/a/b/c"),
        ("GET", "/v1/models/scores/"), ("GET", "/v1/recommend/"), ("GET", "/v1/limits/"),
        ("POST", "/v1/models"), ("POST", "/v1/models/scores"), ("POST", "/v1/nothing:predict"),
        ("PUT", "/v1/models/scores:predict"), ("DELETE", "/v1/recommend"),
        ("POST", "/v1/models/scores:predict/"), ("GET", "/v1/models/scores:predict"),
        ("POST", "/v1/limits"), ("GET", "/v1//models/scores"),
    ],
)  # fmt: skip
def test_paths_that_are_malformed_are_bad_requests(client, method, path) -> None:
    answer = client.request(method, path, follow_redirects=False)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"Malformed request: {method} {path}")


def test_further_keys_of_a_request_are_passed_over(client) -> None:
    def ask(method: str, body: dict) -> dict:
        answer = client.post(f"/v1/models/scores:{method}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    further = {"name": "x", "output_filter": ["click"], "Instances": 1, "parameters": {"a": [1]}}
    columns = {name: [value] for name, value in ROWS[0].items()}
    bodies = ({"instances": ROWS[:1]}, {"examples": ROWS}, {"inputs": columns})
    for method, body in zip(("predict", "regress", "predict"), bodies, strict=True):
        assert ask(method, {**further, **body}) == ask(method, body)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("scores:classify", "No signature was found with the name: no"),
        ("scores:regress", "No signature was found with the name: no"),
        ("scores:predict", 'Serving signature name: "no" not found in signature def'),
        ("scores/labels/x:predict", "Unrecognized servable version label: x"),
    ],
)
def test_signatures_and_labels_that_are_not_there(client, path, said) -> None:
    body = {"signature_name": "no", "examples": [{}], "instances": [{}]}
    answer = client.post(f"/v1/models/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(said)


def test_a_version_may_be_written_with_zeros(client) -> None:
    assert client.get("/v1/models/scores/versions/001").status_code == 200
