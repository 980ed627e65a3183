"""Requests that ask for far more than they say, and what `/healthz` takes meanwhile."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.bench.serve.load import Request, Served, ask, run_job, take_core

CONNECTIONS = 4
"""That attack at a time."""
SILENT = 600
"""Connections that say nothing; more than a server takes."""
HEALTH: Request = ("GET", "/healthz", None)


def build_attacks(row: Mapping[str, Any]) -> dict[str, Request]:
    """Builds requests, by what is wrong with them.

    Args:
        row: A row of `score_items`, with `items`.
    """

    def predict(body: Any) -> Request:
        return ("POST", "/v1/models/ranker:predict", body)

    def recommend(body: Any) -> Request:
        return ("POST", "/v1/recommend", body)

    def choose(count: int) -> Request:
        return recommend({"user": 1003, "filter": {"category": [str(n) for n in range(count)]}})

    def score(rows: int, items: int) -> Request:
        one = {**row, "items": [101] * items}
        return predict({"signature_name": "score_items", "instances": [one] * rows})

    return {
        "1.2 MB of wrong keys": recommend({"user": 1003, "exclude": [None] * 200_000}),
        "40,000 unknown keys": recommend({f"key{n}": 1 for n in range(40_000)}),
        "a filter of 100,000 values": choose(100_000),
        "a filter of 1,000 values": choose(1000),
        "400,000 candidates": score(1, 400_000),
        "100 rows of 1,000 candidates": score(100, 1000),
        "20,000 candidates, as many as allowed": score(1, 20_000),
        "4 MB of empty lists": predict('{"instances": [' + "[]," * 1_300_000 + "[]]}"),
        "240,000 empty lists": predict('{"instances": [' + "[]," * 120_000 + "[]]}"),
        "120,000 names": predict({"inputs": {f"n{n}": 1 for n in range(60_000)}}),
        "nested lists": predict('{"instances": ' + "[" * 1_000_000),
        "a text of 3 MB": recommend({"user": "x" * 3_000_000}),
        "a user id of 10 MB": recommend({"user": "x" * 10_000_000}),
        "digits": predict('{"instances": [' + "9" * 1_000_000 + "]}"),
    }  # fmt: skip


def attack(
    served: Served, row: Mapping[str, Any], grpc_port: int, seconds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Attacks a server in each way for a while.

    Yields:
        Name of the attack, the first one `nothing`, and what it did: percentiles of `/healthz` in
        milliseconds, what was answered to the attack, and the resident memory of the server before
        and after it.
    """
    works: dict[str, Callable[[], Any]] = {
        name: partial(_repeat, served, request, seconds)
        for name, request in build_attacks(row).items()
    }
    calls = {"what": "attack", "port": grpc_port, "seconds": seconds}
    works["one value for 400,000, by gRPC"] = partial(run_job, {**calls, "kind": "broadcast"})
    silent = {**calls, "port": served.port, "kind": "silent"}
    works[f"{SILENT} silent connections"] = partial(run_job, silent)
    ask(served, [HEALTH], 1, seconds=2)
    yield "nothing", {**ask(served, [HEALTH], 1, seconds=seconds), "MiB": served.read_mib()}
    for name, work in works.items():
        before = served.read_mib()
        with ThreadPoolExecutor(1) as pool:
            attacked = pool.submit(work)
            health = ask(served, [HEALTH], 1, seconds=seconds)
            answers = attacked.result()
        yield name, {**health, "attack": answers, "MiB": before, "MiB after": served.read_mib()}


def _repeat(served: Served, request: Request, seconds: int) -> dict[str, int]:
    codes: dict[str, int] = ask(served, [request], CONNECTIONS, seconds=seconds)["codes"]
    return codes


def drive_attack(job: dict[str, Any]) -> dict[str, int]:
    """Does the job of an attack that is no HTTP request; in a process of its own."""
    take_core(1)
    drive = _call if job["kind"] == "broadcast" else _keep_silent
    return dict(drive(job["port"], time.perf_counter() + job["seconds"]))


def _keep_silent(port: int, stop: float) -> Counter[str]:
    async def open_one() -> str:
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = await reader.read(12)  # Until it is refused, or closed.
        writer.close()
        if not head:
            return "closed"
        tenths = 1 + int((time.perf_counter() - start) * 10)
        return f"{head[9:].decode()} within {tenths / 10} s"

    async def run() -> Counter[str]:
        tasks = [asyncio.create_task(open_one()) for _ in range(SILENT)]
        await asyncio.wait(tasks, timeout=stop - time.perf_counter())
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return Counter(one if isinstance(one, str) else "open" for one in ended)

    return asyncio.run(run())


def _call(port: int, stop: float) -> Counter[str]:
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis.predict_pb2 import PredictRequest
    from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub

    request = PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "ranker", "score_items"
    for name, value in (("user_id", [1003]), ("gender", ["F"]), ("history", [[101]])):
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    request.inputs["items"].CopyFrom(tf.make_tensor_proto([[101]], tf.int64))
    request.inputs["items"].tensor_shape.dim[1].size = 400_000
    stub, codes = PredictionServiceStub(grpc.insecure_channel(f"127.0.0.1:{port}")), Counter[str]()
    while time.perf_counter() < stop:
        try:
            stub.Predict(request, timeout=60)
            codes["OK"] += 1
        except grpc.RpcError as error:
            codes[error.code().name] += 1
    return codes


def find_port() -> int:
    """Returns a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
