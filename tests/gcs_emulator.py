"""Runs `gcp-storage-emulator` with a thread per connection, in the emulator's own environment.

As it comes it serves one connection at a time, to its end: a client that has not read one object
to its end gets no answer about any other. Requests themselves are still carried out one by one.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from http import server
from typing import Any

from gcp_storage_emulator import __main__ as program
from gcp_storage_emulator.server import RequestHandler

_LOCK = threading.Lock()


def _one_by_one(handle: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(self: Any) -> None:
        connection, self.wfile = self.wfile, io.BytesIO()
        try:
            with _LOCK:
                handle(self)
            connection.write(self.wfile.getvalue())
        finally:
            self.wfile = connection

    return run


def main() -> None:
    """Takes the emulator's own arguments."""
    for name in [name for name in vars(RequestHandler) if name.startswith("do_")]:
        setattr(RequestHandler, name, _one_by_one(getattr(RequestHandler, name)))
    server.HTTPServer = server.ThreadingHTTPServer  # type: ignore[misc]
    program.main()


if __name__ == "__main__":
    main()
