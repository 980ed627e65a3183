"""How much of the exact lists an approximate index finds, how fast, and how far it must look."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conf.artefacts.export import EMBEDDINGS_DIR, KEY, SEEN, USERS_FILE, read_card
from conf.storage.table_files import open_parquet, read_parquet
from training.index.known_entities import read_vectors
from training.index.vector_index import MAX_EFFORT, VectorIndex, build_parameters, merge_lists

TUNED, MEASURED, FILTERED = 256, 512, 100
"""Queries: to choose the effort, to measure what it gives, to measure it with filters."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Masks = Iterable[NDArray[np.bool_]]


@dataclass(frozen=True)
class Queries:
    """Vectors of users, or where the export has none, of items.

    Attributes:
        of: `users` or `items`.
        tuning: `[queries, dim]`, by which the effort is chosen: of users with several vectors each
            is one.
        vectors: `[queries, dim]` or `[queries, interests, dim]`, by which the index is measured:
            others, if there are enough.
        seen: Positions of the items that the first of `vectors` have met; None: not known.
    """

    of: str
    tuning: Floats
    vectors: Floats
    seen: list[Ints] | None = None


def read_queries(version: Path, items: VectorIndex, ids: Ints) -> Queries:
    """Draws queries, the same ones each time.

    Args:
        version: Directory of the version.
        items: Its items.
        ids: Those of the first items, ascending.
    """
    name, files = f"{EMBEDDINGS_DIR}/{USERS_FILE}", read_card(version)["files"]
    path = version / name
    if name not in files or not open_parquet(path).metadata.num_rows:
        count = min(len(items), TUNED + MEASURED)
        vectors = items.exact.reconstruct_batch(_shuffle(len(items))[:count])
        return Queries("items", vectors[:TUNED], vectors[TUNED:] if count > 2 * TUNED else vectors)
    table = read_parquet(path)
    rows = _shuffle(len(table))
    measured = rows[TUNED : TUNED + MEASURED] if len(rows) > 2 * TUNED else rows[:MEASURED]
    vectors = read_vectors(table)
    keys = table[KEY].combine_chunks().take(pa.array(measured[:FILTERED]))
    seen = _read_seen(version / USERS_FILE, keys, ids) if USERS_FILE in files else None
    tuning = vectors[rows[:TUNED]].reshape(-1, items.dim)[:TUNED]
    return Queries("users", tuning, vectors[measured], seen)


def _shuffle(count: int) -> Ints:
    return np.random.default_rng(0).permutation(count)


def _read_seen(path: Path, keys: pa.Array, ids: Ints) -> list[Ints] | None:
    if SEEN not in open_parquet(path).schema_arrow.names:
        return None
    table = read_parquet(path, [KEY, SEEN])
    rows = pc.index_in(keys, value_set=table[KEY].combine_chunks())
    lists = table[SEEN].combine_chunks().take(rows).to_pylist()
    return [np.flatnonzero(np.isin(ids, one or [])) for one in lists]


def tune(index: VectorIndex, queries: Floats, k: int, recall: float) -> VectorIndex:
    """Returns the index with the least effort, a power of two, that reaches a recall.

    Args:
        index: The index; an exact one stays as it is.
        queries: `[queries, dim]`.
        k: Length of the lists.
        recall: The least share of the exact lists that shall be found; where `MAX_EFFORT` does not
            reach it, that stays.
    """
    if index.near is None:
        return index
    expected, effort = index.exact.search(queries, k)[1], 1
    while effort < MAX_EFFORT:
        found = index.near.search(queries, k, params=build_parameters(index.kind, effort))[1]
        if measure_recall(found, expected) >= recall:
            break
        effort *= 2
    return replace(index, effort=effort)


def measure_recall(found: Iterable[Ints], expected: Iterable[Ints]) -> float:
    """Returns the share of each exact list that was found, on average over the lists.

    Args:
        found: Positions of each query's list.
        expected: The same of the exact search.
    """
    pairs = zip(found, expected, strict=True)
    return float(np.mean([np.isin(exact, near).mean() for near, exact in pairs if len(exact)]))


def measure(index: VectorIndex, queries: Queries, k: int) -> dict[str, Any]:
    """Compares the lists of an index with those of the exact search, and times both, one thread.

    Args:
        index: The index.
        queries: What is looked for.
        k: Length of the lists.
    """
    exact, size = VectorIndex(index.exact), len(index)
    everything = np.ones(size, bool)
    expected = _search_exact(index, queries.vectors, k)
    some = queries.vectors[:FILTERED]
    draw = np.random.default_rng(1)
    with _one_thread():
        lists, seconds = _search_all(index, queries.vectors, k, repeat(everything))
        _, exact_seconds = _search_all(exact, some, k, repeat(everything))
        recall = {}
        for n in sorted({min(10, k), k}):
            recall[f"@{n}"] = measure_recall(
                [one[:n] for one in lists], [one[:n] for one in expected]
            )
        tenth = [draw.random(size) < 0.1 for _ in range(len(some))]
        recall[f"@{k} of a tenth of the items"] = _compare(index, some, k, tenth)
        if queries.seen is not None:
            unseen = [_leave_out(seen, size) for seen in queries.seen]
            recall[f"@{k} without seen items"] = _compare(index, some, k, unseen)
    return {
        "queries": {"of": queries.of, "count": len(queries.vectors)},
        "k": k,
        "recall": recall,
        "milliseconds": {"median": _take_ms(seconds, 50), "p99": _take_ms(seconds, 99),
                         "median of the exact search": _take_ms(exact_seconds, 50)},
    }  # fmt: skip


def _search_exact(index: VectorIndex, queries: Floats, k: int) -> list[Ints]:
    """Returns the exact list of each query; all are searched for at once."""
    vectors = queries.reshape(len(queries), -1, index.dim)
    scores, positions = index.exact.search(vectors.reshape(-1, index.dim), k)
    shape = (*vectors.shape[:2], k)
    pairs = zip(positions.reshape(shape), scores.reshape(shape), strict=True)
    return [merge_lists(list(zip(*one, strict=True)), k)[0] for one in pairs]


def _leave_out(positions: Ints, size: int) -> NDArray[np.bool_]:
    allowed = np.ones(size, bool)
    allowed[positions] = False
    return allowed


def _compare(index: VectorIndex, queries: Floats, k: int, allowed: Masks) -> float:
    masks = list(allowed)
    found, _ = _search_all(index, queries, k, masks)
    expected, _ = _search_all(VectorIndex(index.exact), queries, k, masks)
    return measure_recall(found, expected)


def _search_all(
    index: VectorIndex, queries: Floats, k: int, allowed: Masks
) -> tuple[list[Ints], list[float]]:
    lists, seconds = [], []
    for query, mask in zip(queries, allowed, strict=False):
        start = time.perf_counter()
        lists.append(index.search(query, k, mask)[0])
        seconds.append(time.perf_counter() - start)
    return lists, seconds


def _take_ms(seconds: list[float], percentile: int) -> float:
    return round(float(np.percentile(seconds, percentile)) * 1e3, 3)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
