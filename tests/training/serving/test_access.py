"""Who may ask: names of hosts, tokens, and what browsers are told."""

from __future__ import annotations

import re

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from conf.errors import ConfigError
from jobs.support.serving import read_token
from training.serving.access import Access, Guard

TOKEN = "0123456789abcdef" * 2


def ask(access: Access, path: str = "/metrics", **headers: str):
    guard = Guard(PlainTextResponse("answered"), access)
    return TestClient(guard, "http://localhost").get(path, headers=headers)


@pytest.mark.parametrize(
    ("access", "host", "status"),
    [
        (Access(), "localhost:8501", 200),
        (Access(), "LocalHost", 200),
        (Access(), "127.0.0.1:", 200),
        (Access(), "[::1]:8501", 200),
        (Access(), "evil.example:8501", 421),
        (Access(), "localhost.evil.example", 421),
        (Access(), "10.0.0.1", 421),
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
        (Access("::"), "bad.de", 421),
        (Access("0.0.0.0", ("Models.example",)), "models.example:80", 200),
        (Access(hosts=("*",)), "any.example", 200),
    ],
)
def test_the_server_is_asked_by_its_own_names(access, host, status) -> None:
    answer = ask(access, Host=host.encode("latin-1"))
    assert answer.status_code == status
    if status == 421:
        assert "--allow-host NAME" in answer.json()["error"]


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
    for answer in (ask(Access()), ask(Access(), Host="evil.example"), ask(Access(token=TOKEN))):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert "content-security-policy" not in ask(Access(docs=True), "/docs").headers
    page = client.get("/").text
    assert not re.search(r"<script>|<style>| on\w+=", page)  # The policy would not run them.
    for name, kind in (("page.js", "text/javascript"), ("page.css", "text/css")):
        assert f'"{name}"' in page
        assert client.get(f"/{name}").headers["content-type"].startswith(kind)
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize("text", ["short\n", "a b" * 9, "", "ü" * 20])
def test_tokens_are_read_from_files(tmp_path, text) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\nmore")
    assert read_token(path) == TOKEN
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_token(path)
    assert text.strip() not in caught.value.received or not text
    with pytest.raises(ConfigError):
        read_token(tmp_path / "none")
