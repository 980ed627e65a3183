"""Who may ask: names of hosts, tokens, what browsers are told, and how much is logged."""

from __future__ import annotations

import logging
import re

import pytest
import tensorflow as tf
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from training.serving.log_limit import LogLimit

from conf.errors import ConfigError
from tests.training.serving.tiny_models import ROW
from training.serving.access import ERROR_BYTES, Access, Guard, read_token, refuse

TOKEN = "0123456789abcdef" * 2
PAGE = "<style>p {}</style><script>one()</script><p>"


def ask(access: Access, path: str = "/metrics", **headers: str):
    async def app(scope, receive, send) -> None:
        await PlainTextResponse("answered")(scope, receive, send)

    guard = Guard(app, access, 4096, PAGE)
    return TestClient(guard, "http://localhost").get(path, headers=headers)


@pytest.mark.parametrize(
    ("access", "host", "allowed"),
    [
        (Access(), "localhost:8501", True),
        (Access(), "127.0.0.1", True),
        (Access(), "[::1]:8501", True),
        (Access(), "LocalHost", True),
        (Access(), "evil.example:8501", False),
        (Access(), "localhost.evil.example", False),
        (Access(), "10.0.0.1", False),
        (Access(), "", False),
        (Access("10.0.0.1"), "10.0.0.1:8501", True),
        (Access("10.0.0.1"), "10.0.0.2:8501", False),
        (Access("0.0.0.0"), "10.0.0.2:8501", True),  # No page can make an address point here.
        (Access("::"), "[fe80::1]:8501", True),
        (Access("0.0.0.0"), "evil.example", False),
        (Access("0.0.0.0", ("Models.example",)), "models.example:80", True),
        (Access(hosts=("*",)), "any.example", True),
    ],
)
def test_the_server_is_asked_by_its_own_names(access, host, allowed) -> None:
    assert access.allows_host(host) == allowed
    answer = ask(access, Host=host)
    assert answer.status_code == (200 if allowed else 421)
    if not allowed:
        assert "--allow-host NAME" in answer.json()["error"]


@pytest.mark.parametrize("access", [Access(), Access(hosts=("*",))])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200), ("localhost:65535", 200), ("localhost:080", 200),
        ("localhost:", 200), ("[::1]", 200), ("::1", 200),
        ("localhost:0", 400), ("localhost:65536", 400), ("localhost:123456", 400),
        ("localhost:http", 400), ("localhost:-1", 400), ("localhost:+80", 400),
        ("localhost:8_0", 400), ("localhost: 80", 400), ("localhost:80/", 400),
        ("localhost:\u00b2", 400), ("[::1]:x", 400), ("[::1]80", 400), ("[::1", 400),
    ],
)  # fmt: skip
def test_a_host_has_a_port_that_there_is(access, host, status) -> None:
    answer = ask(access, Host=host.encode("latin-1"))
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"].startswith("Malformed request: no port of a Host: ")


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
    for path in ("/", "/healthz"):
        assert ask(Access(token=TOKEN), path).status_code == 200
    assert ask(Access(token=TOKEN), "/healthz/").status_code == 401


def test_every_answer_tells_browsers_what_it_may_not_do() -> None:
    for answer in (ask(Access()), ask(Access(), Host="evil.example"), ask(Access(token=TOKEN))):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "script-src" not in answer.headers["content-security-policy"]
    policy = ask(Access(), "/").headers["content-security-policy"]
    assert len(re.findall(r"(?:script|style)-src 'sha256-[\w+/=]{44}'", policy)) == 2
    assert "unsafe" not in policy
    assert "content-security-policy" not in ask(Access(docs=True), "/docs").headers


def test_a_long_head_is_refused() -> None:
    assert ask(Access(), Cookie="x" * 5000).status_code == 431
    assert ask(Access(), f"/metrics?user={'x' * 5000}").status_code == 431


@pytest.mark.parametrize(
    "text", ["x" * 10_000, "\x00" * 10_000, "ü" * 10_000, '"\\' * 9000, "\ud800"]
)
def test_errors_have_500_bytes_at_most(text) -> None:
    answer = refuse(text, 400)
    assert len(answer.body) <= ERROR_BYTES
    assert answer.body.startswith(b'{"error": "')


def test_errors_over_http_name_no_folder_of_the_server(client, server, monkeypatch) -> None:
    folder = "/srv/secret/models/scores/1"

    def ask(error: Exception):
        def fail(*inputs: object) -> None:
            raise error

        calls = server.store.get("scores")._model._calls
        monkeypatch.setitem(calls, "serving_default", fail)
        answer = client.post("/v1/models/scores:predict", json={"instances": [ROW]})
        assert "secret" not in answer.text
        assert len(answer.content) <= ERROR_BYTES
        return answer.status_code, answer.json()["error"]

    said = f"cannot read {folder}/vocabulary.txt: {'ü' * 3000}"
    status, shown = ask(tf.errors.InvalidArgumentError(None, None, said))
    assert (status, shown.startswith("cannot read vocabulary.txt: ")) == (400, True)
    assert ask(OSError(2, "no such file", folder))[0] == 500


def test_tokens_are_read_from_files(tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN
    for text, said in (("short\n", "5 characters"), ("a b" * 9, "27 characters"), ("", "0 char")):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no token") as caught:
            read_token(path)
        assert said in caught.value.received
        assert "short" not in caught.value.received
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_one_kind_of_message_does_not_fill_the_log() -> None:
    limit = LogLimit(most=2, seconds=10.0)

    def log(message: str, created: float) -> str | None:
        record = logging.LogRecord("serving", logging.ERROR, "", 0, message, (7,), None)
        record.created = created
        return record.getMessage() if limit.filter(record) else None

    assert [log("bad %d", 0.0) for _ in range(4)] == ["bad 7", "bad 7", None, None]
    assert log("other %d", 1.0) == "other 7"
    assert log("bad %d", 11.0) == "bad 7 (and 2 more of this kind, left out)"
    assert log("bad %d", 12.0) == "bad 7"
    assert log("bad %d", 13.0) is None
