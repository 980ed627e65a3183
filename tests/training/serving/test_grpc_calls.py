"""Calls by gRPC: when a message must arrive, who may send one, how early ends are counted."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from grpc import Compression, StatusCode
from grpc.aio import AioRpcError, Channel, insecure_channel
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.predict_pb2 import PredictRequest
from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub

from training.serving.access import Access
from training.serving.calls import Calls
from training.serving.models.metrics import Metrics
from training.serving.prediction_service import run_service
from training.serving.requests.errors import RequestError

PREDICT = "/tensorflow.serving.PredictionService/Predict"
TOKEN = "t" * 16
ALLOWED = (("authorization", f"Bearer {TOKEN}"),)


def build_good() -> PredictRequest:
    request = PredictRequest(model_spec=ModelSpec(name="scores", signature_name="score_items"))
    rows = {"user_id": [1003], "gender": ["F"], "history": [[101]], "items": [[107, 101]]}
    for name, value in rows.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(np.array(value)))
    return request


def copy_server(server: Any, **limits: Any) -> Any:
    """The server with other limits, and metrics of its own."""
    shared = {name: getattr(server, name) for name in ("store", "batcher", "builder", "bodies")}
    changed = replace(server.limits, **limits)
    return SimpleNamespace(**shared, limits=changed, metrics=Metrics())


def run(server: Any, ask: Callable[[Channel], Awaitable[None]], access: Any = None) -> None:
    async def serve() -> None:
        service = run_service(server, "127.0.0.1:0", access)
        async with service as port, insecure_channel(f"127.0.0.1:{port}") as channel:
            await ask(channel)

    asyncio.run(serve())


async def find_code(call: Awaitable[Any]) -> tuple[StatusCode, str]:
    with pytest.raises(AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def stay_silent() -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""


async def say_nothing() -> AsyncIterator[bytes]:
    for _ in ():
        yield b""


def test_a_message_must_arrive_in_time(server) -> None:
    changed = copy_server(server, seconds=0.3)

    async def ask(channel: Channel) -> None:
        code, said = await find_code(channel.stream_unary(PREDICT)(stay_silent()))
        assert (code, "did not arrive within 0.3 s" in said) == (StatusCode.DEADLINE_EXCEEDED, True)
        changed.limits = server.limits
        code, said = await find_code(channel.stream_unary(PREDICT)(say_nothing()))
        assert (code, "no message" in said) == (StatusCode.INVALID_ARGUMENT, True)
        await PredictionServiceStub(channel).Predict(build_good())

    run(changed, ask)
    shown = changed.metrics.render().decode()
    for status in ("408", "400", "200"):
        assert f'sluice_requests_total{{method="grpc_predict",status="{status}"}} 1.0' in shown


def test_calls_that_never_send_make_place_for_those_that_do(server) -> None:
    changed = copy_server(server, seconds=60.0)

    async def ask(channel: Channel) -> None:
        silent = [channel.stream_unary(PREDICT)(stay_silent()) for _ in range(150)]
        good = PredictionServiceStub(channel).Predict
        await asyncio.gather(*(good(build_good(), timeout=60) for _ in range(50)))
        async with asyncio.timeout(60):
            while sum(one.done() for one in silent) < 80:
                await asyncio.sleep(0.05)
        for one in silent:
            one.cancel()

    run(changed, ask)


def test_a_call_may_begin_while_another_runs_out_of_time(server, monkeypatch) -> None:
    monkeypatch.setattr("training.serving.calls.ARRIVING", 1)
    calls = Calls(copy_server(server, seconds=0.1), Access())
    second: list[asyncio.Task[bytes]] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(calls._read(stay_silent()))
        await asyncio.sleep(0)
        [timer] = calls._arriving
        when = timer.when()
        assert when is not None
        # Begins in the moment between the end of the first one's time and its refusal.
        loop.call_at(
            when - 1e-9, lambda: second.append(loop.create_task(calls._read(stay_silent())))
        )
        with pytest.raises(RequestError, match="did not arrive"):
            await first
        with pytest.raises(RequestError, match="did not arrive"):
            await second[0]

    asyncio.run(ask())


def test_a_token_is_looked_at_before_a_message_arrives(server) -> None:
    async def ask(channel: Channel) -> None:
        call = channel.stream_unary(PREDICT)
        assert (await find_code(call(stay_silent())))[0] == StatusCode.UNAUTHENTICATED
        raw = channel.unary_unary(PREDICT)
        assert (await find_code(raw(b"\xff\xff")))[0] == StatusCode.UNAUTHENTICATED
        code, said = await find_code(raw(b"\xff\xff", metadata=ALLOWED))
        assert (code, "does not parse" in said) == (StatusCode.INVALID_ARGUMENT, True)

    run(copy_server(server), ask, Access(token=TOKEN))


def test_compressed_and_long_messages_are_refused(server) -> None:
    request = build_good()
    request.output_filter.append("x" * (server.limits.body_bytes - 5000))
    assert len(gzip.compress(request.SerializeToString())) < 5000
    long = build_good()
    long.output_filter.append("x" * server.limits.body_bytes)

    async def ask(channel: Channel) -> None:
        stub = PredictionServiceStub(channel)
        call = stub.Predict(request, compression=Compression.Gzip)
        assert (await find_code(call))[0] == StatusCode.UNIMPLEMENTED
        assert (await find_code(stub.Predict(long)))[0] == StatusCode.RESOURCE_EXHAUSTED
        await stub.Predict(build_good())

    run(copy_server(server), ask)


def test_messages_share_the_memory_of_bodies(server) -> None:
    changed, long = copy_server(server), build_good()
    long.output_filter.append("x" * 100_000)
    held = changed.bodies.held

    async def ask(channel: Channel) -> None:
        stub = PredictionServiceStub(channel)
        changed.bodies.held += changed.bodies._most - 50_000
        code, said = await find_code(stub.Predict(long))
        assert (code, "bytes of bodies" in said) == (StatusCode.UNAVAILABLE, True)
        await stub.Predict(build_good())  # A short one is read all the same.
        changed.bodies.held = held
        assert (await find_code(stub.Predict(long)))[0] == StatusCode.INVALID_ARGUMENT

    try:
        run(changed, ask)
        assert changed.bodies.held == held
    finally:
        changed.bodies.held = held


def test_calls_that_end_early_are_counted_as_such(server, monkeypatch) -> None:
    changed = copy_server(server, seconds=0.5)
    calls: list[float] = []

    async def wait(*_: Any) -> None:
        calls.append(changed.limits.seconds)
        await asyncio.sleep(60)

    changed.batcher = SimpleNamespace(call=wait)

    async def ask(channel: Channel) -> None:
        stub = PredictionServiceStub(channel)
        code, said = await find_code(stub.Predict(build_good()))
        assert (code, "within 0.5 s" in said) == (StatusCode.DEADLINE_EXCEEDED, True)
        changed.limits = server.limits
        left = await find_code(stub.Predict(build_good(), timeout=1.0))
        assert left[0] == StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(60):
            while 'status="499"' not in changed.metrics.render().decode():
                await asyncio.sleep(0.05)

    run(changed, ask)
    shown = changed.metrics.render().decode()
    assert 'sluice_requests_total{method="grpc_predict",status="504"} 1.0' in shown
    assert 'sluice_requests_total{method="grpc_predict",status="499"} 1.0' in shown
    assert 'status="200"' not in shown
    assert calls == [0.5, server.limits.seconds]  # Each is asked for once.


def test_other_methods_are_not_implemented(server) -> None:
    async def ask(channel: Channel) -> None:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Guess")
        assert (await find_code(call(b"")))[0] == StatusCode.UNIMPLEMENTED

    run(copy_server(server), ask)


def test_connections_end_when_they_are_old_and_clients_open_others(server, monkeypatch) -> None:
    monkeypatch.setattr("training.serving.prediction_service.AGE_SECONDS", 0.3)
    changed = copy_server(server, seconds=1.0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

    async def serve() -> None:
        service = run_service(changed, "127.0.0.1:0")
        async with service as port, insecure_channel(f"127.0.0.1:{port}") as channel:
            changed.limits = server.limits
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(preface)
            ended = asyncio.create_task(asyncio.wait_for(reader.read(), 60))
            while not ended.done():
                await PredictionServiceStub(channel).Predict(build_good())
                await asyncio.sleep(0.05)
            await ended
            writer.close()

    asyncio.run(serve())
