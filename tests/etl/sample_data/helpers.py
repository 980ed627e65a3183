"""An independent reader of sample logs, and small zip archives with a server of them."""

from __future__ import annotations

import http.server
import io
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

FILES = {"ml-x/users.dat": b"1::F::1::10::48067\n", "ml-x/README": "é".encode("latin-1") * 10}


def make_zip(files: dict[str, bytes] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files or FILES).items():
            archive.writestr(name, content)
    return buffer.getvalue()


@dataclass
class Script:
    """What the server answers: a body, after some failures; and what it was asked."""

    body: bytes
    failures: list[int] = field(default_factory=list)
    stated_length: int | None = None
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


def read_lines(path: Path) -> list[str]:
    return path.read_bytes().decode("latin-1").split("\n")[:-1]


def read_ids(path: Path) -> set[int]:
    return {int(line.split("::")[0]) for line in read_lines(path)}


def classify(folder: Path) -> tuple[list[tuple[int, ...]], Counter[str]]:
    """Returns the valid distinct ratings (user, movie, rating, time) and the count per reason."""
    users, movies = (read_ids(folder / f"{name}.dat") for name in ("users", "movies"))
    counts: Counter[str] = Counter()
    valid: dict[tuple[int, ...], None] = {}
    for line in read_lines(folder / "ratings.dat"):
        fields = line.split("::")
        if not line:
            counts["empty_line"] += 1
        elif len(fields) != 4:
            counts["wrong_field_count"] += 1
        elif not (fields[0].isdecimal() and fields[1].isdecimal()):
            counts["non_numeric_id"] += 1
        elif fields[2] not in ("1", "2", "3", "4", "5"):
            counts["rating_out_of_range"] += 1
        elif int(fields[0]) not in users:
            counts["unknown_user"] += 1
        elif int(fields[1]) not in movies:
            counts["unknown_movie"] += 1
        elif (row := tuple(map(int, fields))) in valid:
            counts["duplicate"] += 1
        else:
            valid[row] = None
    return list(valid), counts


def leave_last_out(rows: list) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[users, movies]` train events and each user's last movie (dense indices)."""
    table = np.array(rows)
    users, user = np.unique(table[:, 0], return_inverse=True)
    movies, movie = np.unique(table[:, 1], return_inverse=True)
    order = np.lexsort((np.arange(len(table)), table[:, 3], user))
    user, movie = user[order], movie[order]
    is_last = np.append(user[1:] != user[:-1], True)
    train = np.zeros((len(users), len(movies)))
    train[user[~is_last], movie[~is_last]] = 1.0
    return train, movie[is_last]


def hit_rate(scores: np.ndarray, train: np.ndarray, target: np.ndarray, k: int = 10) -> float:
    """HR@k over the full catalogue, seen movies removed, ties counted against the model."""
    scores = np.where(train > 0, -np.inf, scores)
    own = scores[np.arange(len(target)), target][:, None]
    return float(((scores >= own).sum(axis=1) <= k).mean())
