"""What the HTTP server is relied on for: order, what is no HTTP/1.1, bodies that nobody reads."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from conf.errors import ExitCode
from jobs.serve import app as serve_app
from jobs.support.run_app import run_app
from jobs.support.serving import bind_socket, build_config
from tests.browser import wait_for
from tests.training.serving.tiny_models import ROW
from training.serving.access import Access, Guard

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path, or with the body of a request to `/read`."""
    body, more = b"", scope["path"] == "/read"
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    body = body or scope["path"].encode()
    size = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": size})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    config = build_config(Guard(answer, Access()), 2.0)
    config.lifespan, listener = "off", bind_socket("127.0.0.1", 0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, sent: bytes) -> bytes:
    """What comes until the server closes the connection, or has said nothing for a while."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), timeout=5) as found:
        found.sendall(sent)
        try:
            while part := found.recv(65536):
                parts.append(part)
        except TimeoutError:
            pass
    return b"".join(parts)


def test_requests_behind_each_other_are_answered_in_order(port) -> None:
    text = ask(port, GET % b"one" * 500 + GET % b"two" + LAST % b"three")
    assert text.count(b"HTTP/1.1 200") == 502
    assert text.index(b"/one") < text.index(b"/two") < text.index(b"/three")


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_1_is_refused(port, sent) -> None:
    assert ask(port, sent).startswith(b"HTTP/1.1 400")


def test_http_1_0_needs_no_host_and_another_protocol_is_not_spoken(port) -> None:
    assert ask(port, b"GET /as HTTP/1.0\r\n\r\n").endswith(b"/as")
    upgrade = b"Host: [::1]\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert ask(port, b"GET /as HTTP/1.1\r\n" + upgrade).endswith(b"/as")


def test_a_body_is_read_in_chunks_and_one_that_nobody_reads_is_let_go(port) -> None:
    head = b"POST /%s HTTP/1.1\r\nHost: localhost\r\n"
    chunks = b"1;name=value\r\na\r\n" * 900 + b"0\r\nX: y\r\n\r\n"
    found = ask(port, head % b"read" + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LAST % b"x")
    assert found.count(b"a" * 900) == 1
    size = 1 << 20
    long = head % b"refused" + b"Content-Length: %d\r\n\r\n" % size + bytes(size)
    assert ask(port, long + LAST % b"next").endswith(b"/next")


def test_a_port_that_is_taken_is_said_before_models_load(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--export", str(tmp_path), "--port", port]
        assert run_app(serve_app, arguments) == ExitCode.CONFIG
    assert run_app(serve_app, ["--export", str(tmp_path), "--port", "0"]) == ExitCode.NOT_READY


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "host", "processes"), [("scores/1", "127.0.0.1", 1), ("", "::1", 2)]
)
def test_a_server_answers_what_has_begun_before_it_ends(models, part, host, processes) -> None:
    command = [sys.executable, "-m", "jobs.cli", "serve", "--export", str(models / part), "--port",
               "0", "--host", host, "--processes", str(processes), "--timeout", "5"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving scores" if part else "serving scores, towers"), line
        port = int(re.findall(r":(\d+)", line)[-1])
        body = json.dumps({"instances": [ROW]}).encode()
        head = b"POST /v1/models/scores:predict HTTP/1.1\r\nHost: [::1]\r\nContent-Length: %d"

        def begin() -> socket.socket:
            found = socket.create_connection((host, port), timeout=60)
            found.sendall(head % len(body) + b"\r\n\r\n" + body[:5])
            return found

        assert begin().recv(12) == b"HTTP/1.1 408"
        slow = begin()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        slow.sendall(body[5:])
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
