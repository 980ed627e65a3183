"""Search for the items of the highest score: exact, or through an index of faiss.

    exact   every allowed item is compared
    ivf     k-means cells: those nearest to the query are compared (Sivic and Zisserman 2003)
    hnsw    a graph of near neighbours is walked (Malkov and Yashunin 2016)

The score is the dot product; of a user with several vectors the largest one: their lists are merged
(Cen et al. 2020, "Controllable multi-interest framework for recommendation", online serving).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from conf.artefacts.export import IndexKind
from conf.storage.atomic_output import atomic_file
from conf.storage.processes import hold_file_lock

_LIBRARY: Any = faiss  # Its stubs know the arguments of C++, not those that Python may pass.
EXACT_FILE, NEAR_FILE, VECTORS_FILE = "exact.faiss", "near.faiss", "vectors.faiss"
EXACT_ITEMS = 50_000  # Comparing so many takes less time than to look for them elsewhere.
GRAPH_SHARE = 4  # A graph loses its way where less than one in so many items is allowed.
CELL_POINTS = 64  # Items that k-means looks at for each cell; faiss warns below 39.
LINKS, BUILD_EFFORT = 32, 80  # Of a graph: neighbours of an item, and candidates for them.
MAX_EFFORT, RECALL = 4096, 0.95  # Where `tune` ends.

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Found = tuple[NDArray[np.int64], Floats]
"""Positions of items and their scores, best first; equal scores in the order of positions."""


@dataclass(frozen=True)
class VectorIndex:
    """Vectors of items by their positions, and what finds the best of them."""

    exact: Any  # All vectors.
    kind: str = "exact"
    near: Any = None  # The approximate index; None: `exact` answers.
    effort: int = 1  # Cells that are looked into, or candidates of a walk.

    def __len__(self) -> int:
        return int(self.exact.ntotal)

    def search(self, vectors: Floats, k: int, allowed: Mask) -> Found:
        """Returns the best `k` items of `allowed [items]` for `[dim]` or `[interests, dim]`."""
        count = int(np.count_nonzero(allowed))
        k = min(k, count)
        if k == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        few = min(EXACT_ITEMS, len(self) // 2)
        if self.kind == IndexKind.HNSW:
            few = max(few, len(self) // GRAPH_SHARE)
        is_exact = self.near is None or count <= few
        search = self._search_exactly if is_exact else self._search_near
        found = [search(one, k, allowed) for one in np.atleast_2d(vectors)]
        return found[0] if len(found) == 1 else merge_lists(found, k)

    def _search_exactly(self, vector: Floats, k: int, allowed: Mask) -> Found:
        """Compares all items; where several tie for the last place, the first of them have it."""
        selector, chosen = _select(allowed), np.flatnonzero(allowed)
        if len(chosen) < min(len(self), EXACT_ITEMS):
            selector = _LIBRARY.IDSelectorArray(chosen)  # Others are not even looked at.
        parameters = _LIBRARY.SearchParameters(sel=selector)
        positions, scores = _search(self.exact, vector, k + 1, parameters)
        if len(scores) <= k or scores[k] < scores[k - 1]:
            return positions[:k], scores[:k]
        parameters = _LIBRARY.SearchParameters(sel=_select(allowed))
        below = float(np.nextafter(scores[k], np.float32("-inf")))
        row = vector[None].astype(np.float32)
        _, found, tied = self.exact.range_search(row, below, params=parameters)
        order = np.lexsort((tied, -found))[:k]
        return tied[order], found[order]

    def _search_near(self, vector: Floats, k: int, allowed: Mask) -> Found:
        """Looks the further, the fewer items are allowed: about as many of them are compared."""
        effort = min(self.effort * len(self) // int(np.count_nonzero(allowed)), MAX_EFFORT)
        if self.kind == IndexKind.IVF:
            parameters = _LIBRARY.SearchParametersIVF(nprobe=effort, sel=_select(allowed))
        else:
            parameters = _LIBRARY.SearchParametersHNSW(efSearch=effort, sel=_select(allowed))
        found = _search(self.near, vector, k, parameters)
        return found if len(found[0]) == k else self._search_exactly(vector, k, allowed)

    def add(self, vectors: Floats) -> None:
        self.exact.add(vectors)
        if self.near is not None:
            self.near.add(vectors)

    def write(self, directory: Path) -> None:
        faiss.write_index(self.exact, str(directory / EXACT_FILE))
        if self.near is not None:
            faiss.write_index(self.near, str(directory / NEAR_FILE))


def open_index(directory: Path, about: Mapping[str, Any], *, can_grow: bool = False) -> VectorIndex:
    """Opens an index by its card; where it does not grow, processes share its pages."""
    flags = 0 if can_grow else faiss.IO_FLAG_MMAP_IFC
    exact = faiss.read_index(str(directory / EXACT_FILE), flags)
    if about["kind"] == IndexKind.EXACT:
        return VectorIndex(exact)
    near = faiss.read_index(str(directory / NEAR_FILE), flags)
    return VectorIndex(exact, about["kind"], near, about["effort"])


def build_exact(vectors: Floats, pages: Path | None = None) -> Any:
    """Builds what compares all vectors, `[items, dim]`; in `pages` processes share a file of it."""
    if pages is None:
        found = faiss.IndexFlatIP(vectors.shape[1])
        found.add(np.ascontiguousarray(vectors, np.float32))
        return found
    pages.mkdir(parents=True, exist_ok=True)
    file = pages / VECTORS_FILE
    with hold_file_lock(pages / ".lock"):
        if not file.exists():
            with atomic_file(file, durable=False) as unfinished:
                faiss.write_index(build_exact(vectors), str(unfinished))
    return faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)


def choose_kind(items: int) -> IndexKind:
    return IndexKind.EXACT if items <= EXACT_ITEMS else IndexKind.IVF


def fit_index(kind: IndexKind | None, vectors: Floats) -> VectorIndex:
    """Builds the index of some vectors, `[items, dim]`; `tune` chooses how far it looks."""
    exact, (items, dim) = build_exact(vectors), vectors.shape
    kind, metric = kind or choose_kind(items), faiss.METRIC_INNER_PRODUCT
    near: Any = None
    if kind == IndexKind.IVF:
        cells = 2 ** round(np.log2(4 * np.sqrt(items)))
        cells = max(1, min(cells, items // CELL_POINTS))
        near = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, cells, metric)
        near.cp.max_points_per_centroid = CELL_POINTS
        near.cp.min_points_per_centroid = 1
        near.train(vectors)
    if kind == IndexKind.HNSW:
        near = faiss.IndexHNSWFlat(dim, LINKS, metric)
        near.hnsw.efConstruction = BUILD_EFFORT
    if near is not None:
        near.add(vectors)
    return VectorIndex(exact, kind, near)


def tune(
    index: VectorIndex, queries: Floats, k: int, goal: float = RECALL
) -> tuple[VectorIndex, float, float]:
    """Doubles the effort of an index until it finds enough of the exact lists of `k`.

    Queries are `[queries, dim]` or `[queries, interests, dim]`. Returns the index, the share that
    it finds (recall@k), and the median milliseconds of a search.
    """
    exact, everything = VectorIndex(index.exact), np.ones(len(index), bool)
    expected = [exact.search(one, k, everything)[0] for one in queries]
    while True:
        found, times = [], [time.perf_counter()]
        for vectors in queries:
            found.append(index.search(vectors, k, everything)[0])
            times.append(time.perf_counter())
        recall = np.mean([np.isin(*one).mean() for one in zip(expected, found, strict=True)])
        if index.near is None or recall >= goal or index.effort >= MAX_EFFORT:
            return index, float(recall), round(float(np.median(np.diff(times))) * 1e3, 3)
        index = replace(index, effort=2 * index.effort)


def _select(allowed: Mask) -> Any:
    if allowed.all():
        return None
    return _LIBRARY.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def _search(index: Any, vector: Floats, k: int, parameters: Any) -> Found:
    scores, positions = index.search(vector[None].astype(np.float32), k, params=parameters)
    is_found = positions[0] >= 0
    scores, positions = scores[0][is_found], positions[0][is_found]
    order = np.lexsort((positions, -scores))
    return positions[order], scores[order]


def merge_lists(lists: Sequence[Found], k: int) -> Found:
    """Merges the lists of a user's vectors: an item counts once, with its largest score."""
    positions = np.concatenate([found for found, _ in lists])
    scores = np.concatenate([found for _, found in lists])
    order = np.lexsort((positions, -scores))
    first = np.unique(positions[order], return_index=True)[1]
    best = order[np.sort(first)[:k]]
    return positions[best], scores[best]


def use_one_thread() -> None:
    """Keeps the searches of the calling thread to it: requests run beside each other already."""
    faiss.omp_set_num_threads(1)
