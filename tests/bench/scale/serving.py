"""What a server takes for a request: of candidates to score, and of items to choose from."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.artefacts.export import read_card

if TYPE_CHECKING:
    from tests.bench.serve.load import Request, Served

DIM, LEAST_ITEMS = 64, 1000
"""Length of vectors; items of the catalogue where candidates are scored."""
WARM_UP_S, LOAD_S = 3, 8
MIB = 1 << 20


def measure_ranking(candidates: int) -> dict[str, float]:
    """Scores candidates of one user in each request, one after the other.

    Args:
        candidates: 600 at most: what the bench's model knows.
    """
    from tests.bench.serve.load import run_job, serve
    from tests.bench.serve.models import build_ranking_row

    with tempfile.TemporaryDirectory() as folder:
        run_job({"what": "models", "directory": folder, "dim": DIM, "items": LEAST_ITEMS})
        models = Path(folder) / "ranker"
        card = read_card(models / "ranker" / "1")
        rows = [build_ranking_row(card, user, candidates) for user in range(50)]
        path = "/v1/models/ranker:predict"
        asked = [("POST", path, {"signature_name": "score_items", "instances": [row]})
                 for row in rows]  # fmt: skip
        with serve(models) as served:
            return _time(served, asked)


def measure_lists(items: int) -> dict[str, float]:
    """Chooses a list out of all items for each request, exactly.

    Args:
        items: Of the catalogue.
    """
    from tests.bench.scale.spark_build import count_bytes
    from tests.bench.serve.__main__ import build_lists
    from tests.bench.serve.load import run_job, serve

    with tempfile.TemporaryDirectory() as folder:
        run_job({"what": "models", "directory": folder, "dim": DIM, "items": items})
        towers = Path(folder) / "towers"
        version = towers / "towers" / "1"
        run_job({"what": "index", "version": str(version), "kind": "exact",
                 "items": str(Path(folder) / "columns.parquet")})  # fmt: skip
        with serve(towers) as served:
            return {**_time(served, build_lists()), "disk_bytes": count_bytes(version)}


def _time(served: Served, requests: Sequence[Request]) -> dict[str, float]:
    from tests.bench.serve.load import ask

    ask(served, requests, 1, seconds=WARM_UP_S)
    before = served.read_cpu_s()
    found = ask(served, requests, 1, seconds=LOAD_S)
    if set(found["codes"]) != {"200"}:
        raise RuntimeError(f"the server answered {found['codes']}")
    return {
        "request_cpu_s": (served.read_cpu_s() - before) / found["count"],
        "p50_ms": found["p50"], "memory_bytes": served.read_mib() * MIB,
        "requests": found["count"],
    }  # fmt: skip
