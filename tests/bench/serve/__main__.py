"""Latency, throughput and memory of `sluice serve`, beside bare calls of the same SavedModel.

    ranking     500 candidates of one user, at 1, 8 and 64 connections
    recommend   lists out of a large catalogue, by each kind of index; recall, memory
    memory      resident memory over many requests
    reload      twenty new versions under load: no request may fail
    fuzz        broken requests: no 500, the process lives
    attack      requests that ask for far more than they say: /healthz meanwhile, memory after

The server has one core, the client another, where there are two. Models are drawn, not trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import numpy as np
from rich.console import Console

from conf.artefacts.export import INDEX_CARD, IndexKind, IndexOptions, read_card
from conf.artefacts.run import read_json
from tests.bench.measurements import (
    BenchReport,
    Measurement,
    build_bench_parser,
    check_positive,
    describe_arguments,
    describe_machine,
    run_bench,
)
from tests.bench.serve.attack import attack
from tests.bench.serve.fuzz import build_requests
from tests.bench.serve.load import (
    Request,
    Served,
    ask,
    ask_by_wrk,
    drive,
    run_job,
    serve,
    summarize,
    take_core,
)
from tests.bench.serve.models import FIRST_USER, USERS, build_ranking_row, export_models

CONNECTIONS = (1, 8, 64)
HEALTH_MS = 50
"""Longest answer of /healthz that is aimed at."""
BATCHES = 20
"""Looks at the memory."""
RELOADS, RELOAD_SECONDS = 20, 120
"""New versions under load; until one must answer."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("serve", __doc__)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--items", type=int, default=1_000_000, help="of the large catalogue")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", default=["exact", "ivf"], choices=list(IndexKind))
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=20, help="of each measurement")
    parser.add_argument("--requests", type=int, default=100_000, help="of memory and fuzz")
    parser.add_argument("--work-dir", type=Path, help="where models go; default: a new folder")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    check_positive(parser, arguments, ("items", "dim", "candidates", "seconds", "requests"))
    if arguments.candidates > 600:
        parser.error("--candidates: the ranking model has 600 items")


@dataclass
class Bench:
    """What all sections share.

    Attributes:
        arguments: The command line.
        directory: Where the models are.
        report: Where figures go.
        console: Where they are printed.
    """

    arguments: argparse.Namespace
    directory: Path
    report: BenchReport
    console: Console

    def note(self, section: str, name: str, found: dict[str, Any]) -> None:
        """Prints and keeps the figures of a load."""
        count = int(found.get("count", 1))
        seconds = count / found["per_s"] if "per_s" in found else 1.0
        self.report.measurements.append(
            Measurement(section, name, name, seconds, seconds, count, details=found)
        )
        parts = [
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in found.items()
        ]
        self.console.print(f"{section}, {name}: {', '.join(parts)}", soft_wrap=True)

    @property
    def ranker(self) -> Path:
        """Version of the ranking model."""
        return self.directory / "ranker" / "ranker" / "1"

    @property
    def towers(self) -> Path:
        """Version of the retrieval model."""
        return self.directory / "towers" / "towers" / "1"

    def build_rankings(self) -> list[Request]:
        """Returns requests that score candidates of one user each."""
        card = read_card(self.ranker)
        rows = [build_ranking_row(card, user, self.arguments.candidates) for user in range(50)]
        path = "/v1/models/ranker:predict"
        return [("POST", path, {"signature_name": "score_items", "instances": [row]})
                for row in rows]  # fmt: skip


def measure_ranking(bench: Bench) -> None:
    """Times candidates of one user: bare calls, then the server."""
    bare = run_job({"what": "bare", "version": str(bench.ranker),
                    "candidates": bench.arguments.candidates,
                    "seconds": bench.arguments.seconds})  # fmt: skip
    bench.note("ranking", "bare call of the SavedModel", bare)
    requests = bench.build_rankings()
    with serve(bench.directory / "ranker") as served:
        ask(served, requests, 1, seconds=3)
        for connections in CONNECTIONS:
            found = ask(served, requests, connections, seconds=bench.arguments.seconds)
            bench.note("ranking", f"{connections} connections", found)
            by_wrk = ask_by_wrk(served, requests[0], connections, bench.arguments.seconds)
            if by_wrk is not None:
                bench.note("ranking", f"{connections} connections, by wrk", by_wrk)


def call_bare(job: dict[str, Any]) -> dict[str, Any]:
    """Calls the SavedModel without a server; in a process of its own."""
    take_core(0)
    from training.serving.served_version import ServedVersion
    from training.serving.tensors import parse_predict

    version = ServedVersion(Path(job["version"]))
    specs = version.find_signature("score_items").specs
    calls = [
        parse_predict({"instances": [build_ranking_row(version.card, n, job["candidates"])]}, specs)
        for n in range(50)
    ]
    for inputs, _ in calls:
        version.call("score_items", inputs)
    times: list[float] = []
    cpu, stop = time.process_time(), time.perf_counter() + job["seconds"]
    while time.perf_counter() < stop:
        start = time.perf_counter()
        version.call("score_items", calls[len(times) % 50][0])
        times.append(time.perf_counter() - start)
    cpu_ms = (time.process_time() - cpu) / len(times) * 1e3
    return {**summarize(times), "per_s": len(times) / sum(times), "count": len(times),
            "cpu_ms": cpu_ms}  # fmt: skip


def measure_recommend(bench: Bench) -> None:
    """Times lists out of the large catalogue, by each kind of index."""
    columns = str(bench.directory / "columns.parquet")
    for kind in bench.arguments.kinds:
        start = time.perf_counter()
        index = Path(run_job({"what": "index", "version": str(bench.towers), "kind": kind,
                              "items": columns})["index"])  # fmt: skip
        card = read_json(index / INDEX_CARD)
        size = sum(info["bytes"] for name, info in card["files"].items() if "faiss" in name)
        bench.note("recommend", f"{kind} index", {
            f"recall @{card['k']}": card["recall"], "ms, median": card["milliseconds"],
            "MB": size / 1e6, "effort": card["effort"],
            "seconds to build and measure": time.perf_counter() - start,
        })  # fmt: skip
        with serve(bench.directory / "towers") as served:
            _measure_lists(bench, served, kind)


def _measure_lists(bench: Bench, served: Served, kind: str) -> None:
    seconds = bench.arguments.seconds
    plain = build_lists()
    ask(served, plain, 1, seconds=3)
    filtered = {"all items": plain, "largest category": build_lists("category_0"),
                "a small category": build_lists("category_30")}  # fmt: skip
    for name, requests in filtered.items():
        bench.note("recommend", f"{kind}, {name}, 1 connection", ask(served, requests, 1,
                                                                     seconds=seconds))  # fmt: skip
    for connections in CONNECTIONS[1:]:
        found = ask(served, plain, connections, seconds=seconds)
        bench.note("recommend", f"{kind}, all items, {connections} connections", found)
    for connections in (CONNECTIONS[0], CONNECTIONS[-1]):
        by_wrk = ask_by_wrk(served, plain[0], connections, seconds)
        if by_wrk is not None:
            bench.note("recommend", f"{kind}, {connections} connections, by wrk", by_wrk)
    bench.note("recommend", f"{kind}, memory", {"resident MiB": served.read_mib()})


def build_lists(category: str | None = None) -> list[Request]:
    """Returns requests for lists, of a category or of all items."""
    more = {} if category is None else {"filter": {"category": category}}
    return [("POST", "/v1/recommend", {"user": FIRST_USER + user, "k": 50, **more})
            for user in range(USERS)]  # fmt: skip


def measure_memory(bench: Bench) -> None:
    """Looks at the resident memory over many requests of both kinds."""
    requests = [*bench.build_rankings(), *build_lists()]
    with serve(_join_models(bench)) as served:
        ask(served, requests, 8, seconds=3)
        found = [served.read_mib()]
        for _ in range(BATCHES):
            ask(served, requests, 8, count=bench.arguments.requests // BATCHES)
            found.append(served.read_mib())
        middle = len(found) // 2
        bench.note("memory", f"{bench.arguments.requests} requests", {
            "MiB at first": found[0], "MiB in the middle": found[middle], "MiB at last": found[-1],
            "codes": ask(served, requests, 8, seconds=1)["codes"],
        })  # fmt: skip


def measure_reload(bench: Bench) -> None:
    """Publishes versions under load, one after the other."""
    models = _join_models(bench)
    requests = [*bench.build_rankings(), *build_lists()]
    seconds = max(10, bench.arguments.seconds)
    with serve(models, "--poll", "0.5") as served, ThreadPoolExecutor(1) as pool:
        ask(served, requests, 8, seconds=3)
        before = ask(served, requests, 8, seconds=seconds)
        bench.note("reload", "before", {**before, "MiB": served.read_mib()})
        published, rounds = pool.submit(_publish, models, served), []
        while not published.done():
            rounds.append(ask(served, requests, 8, seconds=seconds))
        codes = sum((Counter(one["codes"]) for one in rounds), Counter[str]())
        longest = {name: max(one[name] for one in rounds) for name in ("p99", "max")}
        bench.note("reload", f"{RELOADS} new versions meanwhile", {
            **longest, "count": codes.total(), "codes": dict(codes), **published.result()
        })  # fmt: skip
        bench.note("reload", "after", {**ask(served, requests, 8, seconds=seconds),
                                       "MiB": served.read_mib()})  # fmt: skip


def _publish(models: Path, served: Served) -> dict[str, float]:
    """Publishes versions of both models in turn; each when the one before it answers."""
    times = []
    for count in range(RELOADS):
        name, number = ("ranker", "towers")[count % 2], 2 + count // 2
        start = time.perf_counter()
        staging = models / f".{name}"
        shutil.copytree(models / name / "1", staging, copy_function=os.link)
        staging.rename(models / name / str(number))
        while _read_versions(served)[name] != number:
            if time.perf_counter() - start > RELOAD_SECONDS:
                raise RuntimeError(f"version {number} of {name} does not answer")
            time.sleep(0.05)
        times.append(time.perf_counter() - start)
    return {"seconds until one answers": max(times), "reloads": len(times)}


def _read_versions(served: Served) -> dict[str, int]:
    with urllib.request.urlopen(f"http://localhost:{served.port}/healthz", timeout=60) as answer:
        found: dict[str, int] = json.load(answer)["models"]
    return found


def _join_models(bench: Bench) -> Path:
    """Makes a directory of both models, the catalogue as it is without an index."""
    models = Path(tempfile.mkdtemp(dir=bench.directory))
    for version in (bench.ranker, bench.towers):
        shutil.copytree(version, models / version.parent.name / "1",
                        ignore=shutil.ignore_patterns(".lock"))  # fmt: skip
    return models


def measure_fuzz(bench: Bench) -> None:
    """Sends broken requests."""
    models = _join_models(bench)
    blocked, columns = (str(bench.directory / n) for n in ("blocked.txt", "columns.parquet"))
    options = ("--blocked", blocked, "--items", columns)
    with serve(models, *options) as served:
        paths = [models / name / "1" for name in ("ranker", "towers")]
        codes = _fuzz_requests(bench, served, [read_card(path) for path in paths])
        good = ask(served, bench.build_rankings(), 1, count=20)["codes"]
        bench.note("fuzz", f"{bench.arguments.requests} requests", {"codes": codes,
                   "whole requests afterwards": good, "MiB": served.read_mib()})  # fmt: skip
        if set(codes) - {"200", "400", "404", "413"} or set(good) != {"200"}:
            bench.report.skip(f"FUZZ FAILED: {codes}, afterwards {good}")


def _fuzz_requests(bench: Bench, served: Served, cards: Sequence[dict[str, Any]]) -> dict[str, int]:
    left, codes, seed = bench.arguments.requests, Counter[str](), 0
    while left > 0:
        requests = build_requests(cards, np.random.default_rng(seed), min(left, 5000))
        codes.update(ask(served, requests, 8, count=len(requests))["codes"])
        left, seed = left - len(requests), seed + 1
    return dict(codes)


def measure_attack(bench: Bench) -> None:
    """Attacks a server, and asks it meanwhile whether it lives."""
    columns = str(bench.directory / "columns.parquet")
    row = build_ranking_row(read_card(bench.ranker), 1, 1)
    with serve(_join_models(bench), "--items", columns) as served:
        found = {}
        for name, figures in attack(served, row, bench.arguments.seconds):
            bench.note("attack", name, figures)
            found[name] = figures
        good = ask(served, bench.build_rankings(), 1, count=20)["codes"]
        bench.note("attack", "whole requests afterwards", {"codes": good})
    slow = [name for name, figures in found.items() if figures["max"] > HEALTH_MS]
    grown = [name for name, figures in found.items()
             if figures.get("MiB after", 0) > 1.1 * found["nothing"]["MiB"]]  # fmt: skip
    for what, names in ((f"/healthz above {HEALTH_MS} ms", slow), ("memory above 110 %", grown)):
        bench.console.print(f"attack, {what}: {', '.join(names) or 'never'}", soft_wrap=True)
    if set(good) != {"200"}:
        bench.report.skip(f"ATTACK FAILED: afterwards {good}")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "ranking": measure_ranking,
    "recommend": measure_recommend,
    "memory": measure_memory,
    "reload": measure_reload,
    "fuzz": measure_fuzz,
    "attack": measure_attack,
}


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures the sections that are asked for, and prints them."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
        directory = Path(folder)
        run_job({"what": "models", "directory": folder, "dim": arguments.dim,
                 "items": arguments.items})  # fmt: skip
        (directory / "blocked.txt").write_text("101\n102\n", encoding="utf-8")
        bench = Bench(arguments, directory, report, console)
        for section in arguments.sections:
            SECTIONS[section](bench)
    for reason in report.skipped:
        console.print(reason)
    return report


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Does a job of one process."""
    what = job.pop("what")
    if what == "load":
        return drive(job)
    if what == "bare":
        return call_bare(job)
    if what == "models":
        export_models(Path(job["directory"]), dim=job["dim"], items=job["items"])
        return {}
    from training.index.index_build import build_index

    options = IndexOptions(IndexKind(job["kind"]), Path(job["items"]), keep=1)
    return {"index": str(build_index(Path(job["version"]), options))}


def main() -> None:
    """Parses the command line, or a job of one process, and runs."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(work(json.loads(sys.argv[1]))))
    else:
        run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
