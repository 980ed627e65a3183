"""Google's XML API in front of `fake-gcs-server`, which writes by the JSON API alone.

Reads and listings pass through; puts, copies and multipart uploads become requests of the JSON
API, conditions included, so that what holds is what the server makes of them.
"""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

_HOP = {"transfer-encoding", "connection", "content-length", "host", "date", "server"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    port = 0
    parts: dict[tuple[str, int], bytes]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, dict, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        found = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
        if method == "HEAD":
            found["Content-Length"] = answer.getheader("Content-Length") or "0"
        return answer.status, found, answer.read()

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _place(self) -> tuple[str, str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        bucket, _, key = url.path.lstrip("/").partition("/")
        return bucket, quote(unquote(key), safe=""), parse_qs(url.query, keep_blank_values=True)

    def _pass(self) -> None:
        body = self._body()
        self._answer(*self._ask(self.command, self.path, body))

    def do_GET(self) -> None:
        bucket, key, _ = self._place()
        if key and self._ask("GET", f"/storage/v1/b/{bucket}")[0] == 404:
            return self._answer(404, {}, b"<Error><Code>NoSuchBucket</Code><Message/></Error>")
        return self._pass()

    def do_HEAD(self) -> None:
        self._pass()

    def _write(self, data: bytes) -> None:
        bucket, key, _ = self._place()
        condition = self.headers.get("x-goog-if-generation-match")
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={key}"
        if condition is not None:
            target += f"&ifGenerationMatch={condition}"
        status, _, body = self._ask("POST", target, data)
        if status != 200:
            return self._answer(status, {}, body)
        made = json.loads(body)
        headers = {"ETag": made["etag"], "x-goog-generation": made["generation"]}
        text = f"<R><Bucket/><Key/><Location/><ETag>{made['etag']}</ETag></R>"
        return self._answer(200, headers, text.encode() if self.command == "POST" else b"")

    def do_PUT(self) -> None:
        bucket, key, query = self._place()
        body, source = self._body(), self.headers.get("x-goog-copy-source")
        if "partNumber" in query:
            self.parts[query["uploadId"][0], int(query["partNumber"][0])] = body
            self._answer(200, {"ETag": '"part"'})
        elif source is not None:
            there, _, name = unquote(source).lstrip("/").partition("/")
            target = f"/storage/v1/b/{there}/o/{quote(name, safe='')}/rewriteTo/b/{bucket}/o/{key}"
            status, _, body = self._ask("POST", target)
            self._answer(status, {}, b"" if status == 200 else body)
        elif not key:
            status, _, body = self._ask(
                "POST", "/storage/v1/b", json.dumps({"name": bucket}).encode()
            )
            self._answer(status, {}, body)
        else:
            self._write(body)

    def do_POST(self) -> None:
        _, _, query = self._place()
        self._body()
        if "uploads" in query:
            text = f"<R><Bucket/><Key/><UploadId>{uuid.uuid4().hex}</UploadId></R>"
            return self._answer(200, {}, text.encode())
        mine = sorted(key for key in self.parts if key[0] == query["uploadId"][0])
        return self._write(b"".join(self.parts.pop(key) for key in mine))

    def do_DELETE(self) -> None:
        _, _, query = self._place()
        if "uploadId" in query:
            return self._answer(204, {})
        return self._pass()


def run_front(port: int) -> ThreadingHTTPServer:
    """Runs the XML API in front of the server at a port; `shutdown` ends it."""
    handler = type("Handler", (_Handler,), {"port": port, "parts": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
