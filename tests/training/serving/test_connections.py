"""Connections: how many, how long each may be silent, slow or deaf; what is no HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import cast

import pytest
import uvicorn
from training.serving.connections import Connection

from jobs.support.serving import allow_files, build_config
from tests.browser import wait_for
from training.serving.access import Access, Guard
from training.serving.requests.limits import ConnectionLimits, ServerLimits

# Times that no client of a busy machine exceeds; tests of a time set it with `limit`.
LIMITS = ConnectionLimits(
    count=3, head_bytes=4096, head_seconds=60.0, idle_seconds=60.0, write_seconds=60.0
)
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
LONG = 64 << 20
CHUNKED = (
    b"POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
NOSNIFF = b"x-content-type-options: nosniff"


async def answer(scope, receive, send) -> None:
    """Answers with the path; `/long` with more than buffers hold, `/slow` after a while.

    `/read` and `/headers` read the body first, and answer with it or with the names of headers.
    """
    if scope["type"] != "http":
        return
    path, body = scope["path"], scope["path"].encode()
    if path == "/long":
        body = bytes(LONG)
    if path == "/slow":
        await asyncio.sleep(0.3)
    if path in ("/read", "/headers"):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
    if path == "/headers":
        body = b",".join(name for name, _ in scope["headers"])
    size = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": size})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def run_server() -> Iterator[tuple[int, uvicorn.Server, type[Connection]]]:
    guard = Guard(answer, Access(), LIMITS.head_bytes, page="")
    config = build_config(guard, ServerLimits(seconds=1.0, connections=LIMITS))
    config.port, config.lifespan, config.log_level = 0, "off", "critical"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield port, server, cast(type[Connection], config.http_protocol_class)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[int, uvicorn.Server, type[Connection]]]:
    with run_server() as found:
        yield found


@pytest.fixture
def port(running) -> int:
    port, server, _ = running
    wait_for(lambda: not server.server_state.connections)
    return port


@pytest.fixture
def limit(running, monkeypatch) -> Callable[..., None]:
    """Changes limits of connections for a test."""

    def change(**limits: float) -> None:
        monkeypatch.setattr(running[2], "limits", replace(LIMITS, **limits))

    return change


def connect(port: int, *parts: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=30)
    for part in parts:
        found.sendall(part)
    return found


def read_all(found: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    while part := found.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_error(found: socket.socket) -> tuple[bytes, str]:
    head, _, body = read_all(found).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return head[9:12], json.loads(body)["error"]


def test_a_silent_connection_is_closed_without_a_word(port, limit) -> None:
    limit(idle_seconds=0.4)
    assert read_all(connect(port)) == b""


def test_a_head_that_does_not_end_is_refused(port, limit) -> None:
    limit(head_seconds=0.4)
    status, said = read_error(connect(port, b"GET / HTTP/1.1\r\nHost: x"))
    assert (status, "did not arrive within 0.4 s" in said) == (b"408", True)


def test_a_head_that_drips_is_refused_too(port, limit) -> None:
    limit(head_seconds=0.4)
    found = connect(port, b"GET / HTTP/1.1\r\n")
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            try:
                found.sendall(b"X: 1\r\n")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert found.recv(12) == b"HTTP/1.1 408"
    finally:
        stop.set()
        thread.join()


def test_a_full_server_says_so_and_takes_the_next_when_one_has_left(
    running, port, monkeypatch
) -> None:
    kept = [connect(port, GET % b"first") for _ in range(LIMITS.count)]
    for found in kept:
        assert found.recv(12) == b"HTTP/1.1 200"
    with monkeypatch.context() as patch:
        # It says so at once, not when it is done with the connection.
        patch.setattr("training.serving.connections.LINGER_SECONDS", 600.0)
        status, said = read_error(connect(port))
        assert (status, "it has 3 connections" in said) == (b"503", True)
    wait_for(lambda: not running[2].refused)
    # What it is sent is not read, and does not keep it.
    assert read_error(connect(port, GET % b"more"))[0] == b"503"
    kept.pop().close()

    def ask() -> bytes:
        return connect(port, GET % b"again").recv(12)

    wait_for(lambda: ask() == b"HTTP/1.1 200")


def test_requests_behind_each_other_are_answered_in_order(port) -> None:
    found = connect(port, GET % b"one" + GET % b"two" + LAST % b"three")
    text = read_all(found)
    assert text.count(b"HTTP/1.1 200") == 3
    assert text.index(b"/one") < text.index(b"/two") < text.index(b"/three")


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1]\r\nX: " + b"y" * 300_000,
    ],
)
def test_what_is_no_http_1_is_refused(port, limit, sent) -> None:
    limit(head_seconds=0.4)
    found = connect(port, sent)
    assert found.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 431")


def test_a_client_that_does_not_read_is_left(running, port, limit) -> None:
    limit(write_seconds=1.0)
    found = connect(port, GET % b"long")
    assert found.recv(12) == b"HTTP/1.1 200"
    wait_for(lambda: not running[1].server_state.connections)
    assert len(read_all(found)) < LONG


def test_another_protocol_is_not_spoken(port) -> None:
    upgrade = (
        b"GET /as HTTP/1.1\r\nHost: [::1]\r\nConnection: Upgrade, close\r\n"
        b"Upgrade: websocket\r\n\r\n"
    )
    assert read_all(connect(port, upgrade)).endswith(b"/as")


def test_the_limits_of_a_server_are_its_own() -> None:
    assert Connection.limits == ConnectionLimits()


def test_files_for_connections_are_asked_for() -> None:
    from conf.errors import ConfigError

    allow_files(1)
    with pytest.raises(ConfigError, match="as many files") as caught:
        allow_files(1 << 40)
    assert "--max-connections" in caught.value.fix


def test_a_body_that_nobody_reads_ends_the_connection(port) -> None:
    found = connect(
        port, b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n123"
    )
    text = read_all(found)
    assert text.startswith(b"HTTP/1.1 200")
    assert text.endswith(b"/x")


def test_a_long_head_is_refused_before_it_ends(port) -> None:
    found = connect(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 5000)
    status, said = read_error(found)
    assert (status, "the head of a request may have" in said) == (b"431", True)


def test_a_client_that_sends_more_than_is_read_gets_its_answer(port):
    size = 8 << 20  # More than the buffers of both sides hold.
    head = b"POST /refused HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
    with connect(port, head, bytes(size)) as found:  # A reset would end the sending.
        assert read_all(found).endswith(b"/refused")


@pytest.mark.parametrize("line", [b"y" * 1000, b"a:b\r\n" * 200, b"X: " + b"z" * 997])
def test_what_follows_the_last_chunk_is_limited(port, line) -> None:
    head = CHUNKED.replace(b"/x", b"/read")
    with connect(port, head, b"2\r\nab\r\n0\r\nX: ") as found:
        try:
            for _ in range(200):
                found.sendall(line)
                time.sleep(0.001)
        except ConnectionError:
            pass
        status, said = read_error(found)
    assert (status, "the head of a request may have" in said) == (b"431", True)


def test_chunks_that_come_in_small_parts_are_read(port) -> None:
    with connect(port, CHUNKED.replace(b"/x", b"/read")) as found:
        for _ in range(900):  # What is not body is longer than a head may be.
            found.sendall(b"1;name=value\r\n")
            found.sendall(b"a\r\n")
        found.sendall(b"0\r\nX: y\r\n\r\n")
        assert read_all(found).endswith(b"\r\n\r\n" + b"a" * 900)


def test_what_follows_the_last_chunk_is_no_header(port) -> None:
    head = CHUNKED.replace(b"/x", b"/headers")
    text = read_all(connect(port, head + b"0\r\nHost: evil.example\r\nX: y\r\n\r\n"))
    assert text.endswith(b"\r\n\r\nhost,connection,transfer-encoding")


def test_many_requests_in_one_write_are_answered(port) -> None:
    request, last = GET % b"one", LAST % b"one"
    assert 500 * len(request) > 4 * LIMITS.head_bytes
    with connect(port, request * 500 + last[:20]) as found:
        found.sendall(last[20:])
        text = read_all(found)
    assert text.count(b"HTTP/1.1 200") == 501
    assert b"HTTP/1.1 400" not in text


def test_requests_that_wait_are_few_and_the_rest_is_not_read(running, port) -> None:
    server = running[1]
    found = connect(port, GET % b"slow")
    found.settimeout(1.0)
    sent = 0
    with suppress(TimeoutError):
        while sent < LONG:
            sent += found.send((GET % b"slow") * 5000)
    assert sent < LONG
    [connection] = server.server_state.connections
    assert len(connection.pipeline) < 200
    most = 0
    for _ in range(20):  # Each answer makes room for another request, not for another read.
        time.sleep(0.1)
        most = max(most, len(connection.pipeline))
    assert most < 200
    found.close()


def test_a_client_that_asks_for_the_end_gets_its_answer_while_it_sends(port) -> None:
    size = 8 << 20
    for head in (
        b"POST /refused HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d"
        b"\r\n\r\n",
        b"POST /refused HTTP/1.0\r\nContent-Length: %d\r\n\r\n",
    ):
        with connect(port, head % size, bytes(size)) as found:
            text = read_all(found)
        assert text.endswith(b"/refused")
        assert b"connection: close" in text


def test_a_long_answer_is_whole_though_the_body_was_not_read(port, monkeypatch) -> None:
    monkeypatch.setattr("training.serving.connections.LINGER_SECONDS", 0.25)
    head = b"POST /long HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\nabc"
    with connect(port, head) as found:
        size = 0
        for _ in range(8):  # Longer than a connection stays whose answer is read.
            time.sleep(0.05)
            size += len(found.recv(4 << 20, socket.MSG_WAITALL))
        size += len(read_all(found))
    assert size > LONG


def test_an_answer_that_nobody_reads_ends_though_the_body_was_not_read(
    running, port, limit
) -> None:
    limit(write_seconds=1.0)
    head = b"POST /long HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\nabc"
    with connect(port, head) as found:
        assert found.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: not running[1].server_state.connections)


def test_refusals_of_connections_tell_browsers_what_they_may_not_do(port, limit) -> None:
    limit(head_seconds=0.4)
    for sent in (b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost"):
        text = read_all(connect(port, sent)).lower()
        assert NOSNIFF in text
        assert b"content-security-policy: default-src 'none'" in text
        assert b"cache-control: no-store" in text


def test_only_http_1_0_needs_no_host(port) -> None:
    assert connect(port, b"GET / HTTP/1.1\r\n\r\n").recv(12) == b"HTTP/1.1 400"
    assert connect(port, b"GET / HTTP/1.0\r\n\r\n").recv(12) == b"HTTP/1.1 200"
