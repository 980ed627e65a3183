"""Who may ask the server: names of hosts, a token, and what browsers are told about answers.

A page of another site can make a browser ask a server on its own machine, under a name that it
has made point there. So the name that a request is sent to must be one of the server's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import Response

from conf.errors import ConfigError
from training.serving.requests.errors import (
    LONG_HEAD,
    MESSAGE_CHARACTERS,
    NO_TOKEN,
    WRONG_HOST,
    RequestError,
    cut,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_PORT = 65_535
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/healthz")
"""Asked without a token: a page without data, and what watches over the server."""
DOCS_PATHS = ("/docs", "/redoc", "/docs/oauth2-redirect")
ERROR_BYTES = 500
"""Longest body of an error."""
TOKEN_CHARACTERS = (16, 4096)
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""What each answer tells browsers."""
POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""What a browser may load and run of an answer."""


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        host: Address that the server listens at.
        hosts: Further names that it may be asked by; `*`: any name.
        token: What `Authorization: Bearer …` must hold; None: nothing.
        docs: Whether the pages that describe the API are shown.
    """

    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    token: str | None = None
    docs: bool = False

    def allows_host(self, header: str) -> bool:
        """Whether the server may be asked by a name.

        Args:
            header: `Host` of a request, with a port or without.
        """
        name, _ = _split_host(header.lower())
        if name in LOOPBACK or name == self.host.lower() or "*" in self.hosts:
            return True
        if name in (host.lower() for host in self.hosts):
            return True
        try:  # At all addresses: no site can make an address, unlike a name, point here.
            return ipaddress.ip_address(self.host).is_unspecified and bool(
                ipaddress.ip_address(name)
            )
        except ValueError:
            return False

    def allows_token(self, header: str | None) -> bool:
        """Whether a request with a header `Authorization`, or with none, may be answered."""
        if self.token is None:
            return True
        kind, _, given = (header or "").partition(" ")
        is_same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return is_same and kind.lower() == "bearer"


def _split_host(header: str) -> tuple[str, str]:
    """Returns the name of a header `Host`, and what follows: nothing, or a colon and a port."""
    header = header.strip()
    if header.startswith("["):
        name, end, rest = header[1:].partition("]")
        return name, rest if end else header
    if header.count(":") > 1:
        return header, ""
    name, colon, port = header.partition(":")
    return name, colon + port


def _has_good_port(header: str) -> bool:
    """Whether a header `Host` has a port that there is, or none; the number may be left out."""
    colon, port = _split_host(header)[1][:1], _split_host(header)[1][1:]
    if not port:
        return colon in ("", ":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    return colon == ":" and is_number and 0 < int(port) <= MOST_PORT


def read_token(path: Path) -> str:
    """Reads the token of a file: its first line.

    Raises:
        ConfigError: The file cannot be read, or holds no token.
    """
    fewest, most = TOKEN_CHARACTERS
    try:
        with path.open(encoding="ascii") as file:
            token = file.readline(most + 2).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the file of the token cannot be read", received=error) from error
    if not fewest <= len(token) <= most or not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            "the file holds no token that can be used",
            received=f"{len(token)} characters in the first line of {path}",
            allowed=f"{fewest} to {most} ASCII characters without spaces, in the first line",
            fix=f"write one: openssl rand -hex 32 > {path}",
        )
    return token


class Guard:
    """Stands before an application: refuses who may not ask, and adds headers to all answers.

    Args:
        app: The application.
        access: Who may ask.
        head_bytes: Longest head of a request.
        page: The page at `/`, whose script and style browsers may run.
    """

    def __init__(self, app: Application, access: Access, head_bytes: int, page: str) -> None:
        self._app, self._access, self._head_bytes = app, access, head_bytes
        self._headers = [*SECURITY_HEADERS, (b"content-security-policy", POLICY.encode())]
        of_page = f"{POLICY}; connect-src 'self'; img-src 'self' data:; {_allow_inline(page)}"
        self._page_headers = [*SECURITY_HEADERS, (b"content-security-policy", of_page.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = self._page_headers if path == "/" else self._headers
        if self._access.docs and path in DOCS_PATHS:
            headers = list(SECURITY_HEADERS)  # They load scripts from elsewhere.

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            self._check(scope)
        except RequestError as error:
            more = {"WWW-Authenticate": "Bearer"} if error.status == NO_TOKEN else None
            answer = refuse(error.message, error.status, more)
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        """Refuses a request that may not be asked.

        Raises:
            RequestError: It may not.
        """
        if scope["http_version"] not in ("1.0", "1.1"):
            raise RequestError(f"HTTP/{scope['http_version']} is not spoken here; ask by HTTP/1.1")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._head_bytes:
            raise RequestError(
                f"the head of a request may have {self._head_bytes} bytes; received {size}",
                LONG_HEAD,
            )
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError("Malformed request: it has several headers Host")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host")
        if host is None and scope["http_version"] == "1.1":
            raise RequestError("Malformed request: it has no header Host, which HTTP/1.1 needs")
        if host is not None and not _has_good_port(host):
            raise RequestError(f"Malformed request: no port of a Host: {cut(host, 100)}")
        if host is not None and not self._access.allows_host(host):
            raise RequestError(
                f"this server is not asked by the name {cut(host, 100)}; allowed: "
                f"{', '.join(_list_names(self._access))}; start it with --allow-host NAME",
                WRONG_HOST,
            )
        if scope["path"] not in OPEN_PATHS and not self._access.allows_token(
            headers.get(b"authorization")
        ):
            raise RequestError("a request needs the header Authorization: Bearer TOKEN", NO_TOKEN)


def _list_names(access: Access) -> Sequence[str]:
    return list(dict.fromkeys((*LOOPBACK, access.host, *access.hosts)))


def _allow_inline(page: str) -> str:
    """Returns the directives that allow the scripts and styles of a page, and no others."""
    kinds: Mapping[str, str] = {"script": "script-src", "style": "style-src"}
    found = []
    for tag, directive in kinds.items():
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts)
        found.append(" ".join((directive, *(f"'sha256-{one.decode()}'" for one in hashes))))
    return "; ".join(found)


def refuse(message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer to a request that is not answered, `ERROR_BYTES` long at most."""
    body = b""
    for most in (MESSAGE_CHARACTERS, ERROR_BYTES // 4, ERROR_BYTES // 8):
        text = json.dumps({"error": cut(message, most)}, ensure_ascii=False)
        body = text.encode("utf-8", "replace")
        if len(body) <= ERROR_BYTES:
            break
    return Response(body, status, headers, media_type="application/json")
