"""Who may ask the server: names of hosts, a token, and what browsers are told about answers."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from training.serving.errors import INVALID, NO_TOKEN, WRONG_HOST, cut

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
OPEN_PATHS = ("/", "/page.css", "/page.js", "/healthz")
"""Asked without a token: a page without data, and what watches over the server."""
_ADDRESS = re.compile(r"[0-9.]+|[0-9a-f:]*:[0-9a-f:.]*")
_PORT = re.compile(r":\d{0,5}$", re.ASCII)
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
]
_POLICY = (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'")


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    host: str = "127.0.0.1"  # Where the server listens.
    hosts: tuple[str, ...] = ()  # Further names that it may be asked by; `*`: any.
    token: str | None = None  # What `Authorization: Bearer …` must hold.
    docs: bool = False  # Whether the pages that describe the API are shown.

    def allows_host(self, header: str) -> bool:
        """Whether the server may be asked by the name of a header `Host`.

        A page of another site can make its own name point at this machine, but no address.
        """
        name = _PORT.sub("", header.strip().lower()).strip("[]")
        if "*" in self.hosts or name in map(str.lower, (*LOOPBACK, self.host, *self.hosts)):
            return True
        return self.host in EVERYWHERE and _ADDRESS.fullmatch(name) is not None

    def allows_token(self, header: bytes) -> bool:
        """Whether a request with this header `Authorization` may be answered."""
        kind, _, given = header.partition(b" ")
        is_same = hmac.compare_digest(given.strip(), (self.token or "").encode())
        return self.token is None or (is_same and kind.lower() == b"bearer")


class Guard:
    """Refuses who may not ask an application, and adds headers to all of its answers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_docs = self._access.docs and scope.get("path") in ("/docs", "/redoc")
        headers = _HEADERS if is_docs else [*_HEADERS, _POLICY]  # Docs load scripts of others.

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refused = self._refuse(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and (hosts or scope["http_version"] == "1.1"):
            return refuse("Malformed request: HTTP/1.1 needs one header Host", INVALID)
        if not all(map(self._access.allows_host, hosts)):
            message = f"this server is not asked by the name {cut(hosts[0], 100)}"
            return refuse(f"{message}; start it with --allow-host NAME", WRONG_HOST)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] in OPEN_PATHS or self._access.allows_token(given):
            return None
        answer = refuse("a request needs the header Authorization: Bearer TOKEN", NO_TOKEN)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer


def refuse(message: str, status: int) -> Response:
    """Returns the answer to a request that is not answered."""
    return JSONResponse({"error": cut(message)}, status)
