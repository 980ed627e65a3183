"""Small zip archives and a server of them on this machine, for the tests."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from etl.samples.archive import Archive

FILES = {"ml-x/users.dat": b"1::F::1::10::48067\n", "ml-x/README": "é".encode("latin-1") * 10}


def make_zip(files: dict[str, bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files or FILES).items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_archive(content: bytes, **changes) -> Archive:
    settings = {
        "name": "ml-x",
        "md5": hashlib.md5(content).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(),
        "required": ("users.dat",),
    }
    return Archive(**{**settings, **changes})


@dataclass
class Script:
    """What the server answers: a body, after some failures; and what it was asked."""

    body: bytes
    failures: list[int] = field(default_factory=list)
    stated_length: int | None = None
    redirect: str | None = None
    asked: list[str] = field(default_factory=list)
    base_url: str = ""


@contextmanager
def serve(script: Script) -> Iterator[Script]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            script.asked.append(self.path)
            if script.failures:
                self.send_error(script.failures.pop(0))
                return
            if script.redirect:
                self.send_response(302)
                self.send_header("Location", script.redirect)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(script.stated_length or len(script.body)))
            self.end_headers()
            self.wfile.write(script.body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.base_url = f"http://127.0.0.1:{server.server_port}/sets"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
