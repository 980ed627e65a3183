"""Connections: how many, how long each may be silent, slow or deaf; what is no HTTP/1.1."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from jobs.serve import allow_files, build_config
from tests.browser import wait_for
from training.serving.access import Access, Guard
from training.serving.connections import Connection
from training.serving.limits import ConnectionLimits, ServerLimits

LIMITS = ConnectionLimits(
    count=3, head_bytes=4096, head_seconds=0.4, idle_seconds=0.6, write_seconds=0.5
)
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = 64 << 20


async def answer(scope, receive, send) -> None:
    """Answers with the path; `/long` with more than buffers hold."""
    if scope["type"] != "http":
        return
    body = bytes(LONG) if scope["path"] == "/long" else scope["path"].encode()
    size = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": size})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def run_server() -> Iterator[tuple[int, uvicorn.Server]]:
    guard = Guard(answer, Access(), LIMITS.head_bytes, page="")
    config = build_config(guard, ServerLimits(seconds=1.0, connections=LIMITS))
    config.port, config.lifespan, config.log_level = 0, "off", "critical"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[int, uvicorn.Server]]:
    with run_server() as found:
        yield found


@pytest.fixture
def port(running) -> int:
    port, server = running
    wait_for(lambda: not server.server_state.connections)
    return port


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


def test_a_silent_connection_is_closed_without_a_word(port) -> None:
    assert read_all(connect(port)) == b""


def test_a_head_that_does_not_end_is_refused(port) -> None:
    status, said = read_error(connect(port, b"GET / HTTP/1.1\r\nHost: x"))
    assert (status, "did not arrive within 0.4 s" in said) == (b"408", True)


def test_a_head_that_drips_is_refused_too(port) -> None:
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


def test_a_full_server_says_so_and_takes_the_next_when_one_has_left(port) -> None:
    kept = [connect(port, GET % b"first") for _ in range(LIMITS.count)]
    for found in kept:
        assert found.recv(12) == b"HTTP/1.1 200"
    status, said = read_error(connect(port))
    assert (status, "it has 3 connections" in said) == (b"503", True)
    # What it is sent is not read, and does not keep it.
    assert read_error(connect(port, GET % b"more"))[0] == b"503"
    kept.pop().close()

    def ask() -> bytes:
        return connect(port, GET % b"again").recv(12)

    wait_for(lambda: ask() == b"HTTP/1.1 200")


def test_requests_behind_each_other_are_answered_in_order(port) -> None:
    found = connect(port, b"".join(GET % name for name in (b"one", b"two", b"three")))
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
def test_what_is_no_http_1_is_refused(port, sent) -> None:
    found = connect(port, sent)
    assert found.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_left(running, port) -> None:
    _, server = running
    found = connect(port, GET % b"long")
    wait_for(lambda: bool(server.server_state.connections))
    wait_for(lambda: not server.server_state.connections)
    assert len(read_all(found)) < LONG


def test_another_protocol_is_not_spoken(port) -> None:
    upgrade = (
        b"GET /as HTTP/1.1\r\nHost: [::1]\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    assert b"/as" in read_all(connect(port, upgrade))


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
    assert (status, "its head is too long" in said) == (b"400", True)


def test_a_client_that_sends_more_than_is_read_gets_its_answer(port):
    size = 8 << 20  # More than the buffers of both sides hold.
    head = b"POST /refused HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
    with connect(port, head, bytes(size)) as found:  # A reset would end the sending.
        assert read_all(found).endswith(b"/refused")
