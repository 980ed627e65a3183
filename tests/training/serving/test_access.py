"""Who may ask: names of hosts, tokens, ports; what browsers are told, what is no HTTP."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from conf.errors import ConfigError, ExitCode
from jobs.serve import app as serve_app
from jobs.support.run_app import run_app
from jobs.support.serving import read_token
from tests.training.serving.tiny_models import ROW
from training.serving.access import Access, Guard

TOKEN = "0123456789abcdef" * 2


def ask(access: Access, path: str = "/metrics", **headers: str):
    guard = Guard(PlainTextResponse("answered"), access)
    return TestClient(guard, "http://localhost").get(path, headers=headers)


@pytest.mark.parametrize(
    ("access", "host", "status"),
    [
        (Access(), "localhost:8501", 200),
        (Access(), "127.0.0.1:", 200),
        (Access(), "[::1]:8501", 200),
        (Access(), "evil.example:8501", 421),
        (Access(), "localhost.evil.example", 421),
        (Access(), "", 421),
        (Access(), "localhost:http", 421),
        (Access(), "localhost:123456", 421),
        (Access(), "localhost:80/", 421),
        (Access(), "localhost:\u00b2", 421),
        (Access(), "[::1]80", 421),
        (Access("10.0.0.1"), "10.0.0.1:8501", 200),
        (Access("10.0.0.1"), "10.0.0.2:8501", 421),
        (Access("0.0.0.0"), "10.0.0.2:8501", 200),  # No page can make an address point here.
        (Access("::"), "[fe80::1]:8501", 200),
        (Access("0.0.0.0"), "evil.example", 421),
        (Access("0.0.0.0", ("Models.example",)), "models.example:80", 200),
        (Access(hosts=("*",)), "any.example", 200),
    ],
)
def test_the_server_is_asked_by_its_own_names(access, host, status) -> None:
    assert ask(access, Host=host.encode("latin-1")).status_code == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (f"Bearer {TOKEN}0", 401),
        ("Bearer ü", 401),
    ],
)
def test_a_token_is_asked_for_but_by_health_and_page(given, status) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = ask(Access(token=TOKEN), **headers)
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)
    for path in ("/", "/page.js", "/healthz"):
        assert ask(Access(token=TOKEN), path).status_code == 200
    assert ask(Access(token=TOKEN), "/healthz/").status_code == 401


def test_every_answer_tells_browsers_what_it_may_not_do(client) -> None:
    for answer in (ask(Access()), ask(Access(), Host="evil.example")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert "content-security-policy" not in ask(Access(docs=True), "/docs").headers
    page = client.get("/").text
    assert not re.search(r"<script>|<style>| on\w+=", page)  # The policy would not run them.
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize("text", ["short\n", "a b" * 9, "ü" * 20])
def test_tokens_are_read_from_files(tmp_path, text) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\nmore")
    assert read_token(path) == TOKEN
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_token(path)
    assert text.strip() not in caught.value.received


BODY = json.dumps({"instances": [ROW]}).encode()
HEAD = b"POST /v1/models/scores:predict HTTP/1.1\r\nHost: [::1]\r\n"
WRONG = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
    HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)


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

        def send(data: bytes) -> socket.socket:
            found = socket.create_connection((host, port), timeout=60)
            found.sendall(data)
            return found

        for wrong in WRONG:
            assert send(wrong).recv(12) == b"HTTP/1.1 400"
        chunks = b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n"
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        assert send(chunked).recv(12) == b"HTTP/1.1 200"
        begun = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:5]
        assert send(begun).recv(12) == b"HTTP/1.1 408"
        slow = send(begun)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        slow.sendall(BODY[5:])
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
