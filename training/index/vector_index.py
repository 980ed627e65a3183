"""Search for the items of the highest score: exact, or through an index of faiss.

    exact   every allowed item is compared
    ivf     k-means cells: those nearest to the query are compared (Sivic and Zisserman 2003)
    hnsw    a graph of near neighbours is walked (Malkov and Yashunin 2016)

The score is the dot product; of a user with several vectors the largest of them. Each vector is
searched for, and the lists are merged (Cen et al. 2020, "Controllable multi-interest framework for
recommendation", online serving): an item of the merged list is in that of its nearest vector, so
that exact lists stay exact.

Items that are not allowed cost nothing but a bit. Where few are allowed, they are all compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

_LIBRARY: Any = faiss
"""Its stubs know the arguments of C++, not those that Python may pass."""
EXACT_ITEMS = 50_000
"""Items that are compared one by one in less time than it takes to look for them elsewhere."""
GRAPH_SHARE = 4
"""A graph loses its way where less than one in so many items is allowed."""
MAX_EFFORT = 4096

Found = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Positions of items and their scores, best first; equal scores in the order of positions."""


@dataclass(frozen=True)
class VectorIndex:
    """Vectors of items, and what finds the best of them.

    Attributes:
        exact: All vectors, by position.
        kind: `exact`, `ivf` or `hnsw`.
        near: The approximate index; None: `exact` answers.
        effort: Cells that are looked into, or length of the list of candidates of the walk.
    """

    exact: Any
    kind: str = "exact"
    near: Any = None
    effort: int = 0

    def __len__(self) -> int:
        return int(self.exact.ntotal)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.exact.d)

    def search(self, vectors: NDArray[np.float32], k: int, allowed: NDArray[np.bool_]) -> Found:
        """Returns the best allowed items.

        Args:
            vectors: Of the user, `[dim]` or `[interests, dim]` float32.
            k: How many, where there are so many.
            allowed: `[items]`.
        """
        count = int(np.count_nonzero(allowed))
        k = min(k, count)
        if k == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        selector = _select(allowed, count)
        found = [self._search(one, k, selector, count) for one in np.atleast_2d(vectors)]
        return found[0] if len(found) == 1 else merge_lists(found, k)

    def _search(self, vector: NDArray[np.float32], k: int, selector: Any, count: int) -> Found:
        if not self._is_few(count):
            found = self._search_near(vector, k, selector, count)
            if len(found[0]) == k:
                return found
        return self._search_exactly(vector, k, selector)

    def _search_exactly(self, vector: NDArray[np.float32], k: int, selector: Any) -> Found:
        """Compares all items; where several tie for the last place, the first of them have it."""
        parameters = _LIBRARY.SearchParameters(sel=selector)
        positions, scores = _search(self.exact, vector, k + 1, parameters)
        if len(scores) <= k or scores[k] < scores[k - 1]:
            return positions[:k], scores[:k]
        below = np.nextafter(scores[k], np.float32("-inf"))
        row = vector[None].astype(np.float32)
        _, found, tied = self.exact.range_search(row, float(below), params=parameters)
        order = np.lexsort((tied, -found))[:k]
        return tied[order], found[order]

    def _is_few(self, count: int) -> bool:
        few = min(EXACT_ITEMS, len(self) // 2)
        if self.kind == "hnsw":
            few = max(few, len(self) // GRAPH_SHARE)
        return self.near is None or count <= few

    def _search_near(self, vector: NDArray[np.float32], k: int, selector: Any, count: int) -> Found:
        """Looks the further, the fewer items are allowed: about as many of them are compared."""
        effort = min(self.effort * len(self) // count, MAX_EFFORT)
        return _search(self.near, vector, k, build_parameters(self.kind, effort, selector))


def build_parameters(kind: str, effort: int, selector: Any = None) -> Any:
    """Returns how an approximate index is searched."""
    if kind == "ivf":
        return _LIBRARY.SearchParametersIVF(nprobe=effort, sel=selector)
    return _LIBRARY.SearchParametersHNSW(efSearch=effort, sel=selector)


def _select(allowed: NDArray[np.bool_], count: int) -> Any:
    if count == len(allowed):
        return None
    if count <= EXACT_ITEMS:
        return _LIBRARY.IDSelectorArray(np.flatnonzero(allowed))
    bits = np.packbits(allowed, bitorder="little")
    return _LIBRARY.IDSelectorBitmap(bits)


def _search(index: Any, vector: NDArray[np.float32], k: int, parameters: Any) -> Found:
    scores, positions = index.search(vector[None].astype(np.float32), k, params=parameters)
    is_found = positions[0] >= 0
    scores, positions = scores[0][is_found], positions[0][is_found]
    order = np.lexsort((positions, -scores))
    return positions[order], scores[order]


def merge_lists(lists: Sequence[Found], k: int) -> Found:
    """Merges the lists of a user's vectors: an item counts once, with its largest score.

    Args:
        lists: Positions and scores of each.
        k: Length of the list that is returned, at most.
    """
    positions = np.concatenate([found for found, _ in lists])
    scores = np.concatenate([found for _, found in lists])
    order = np.lexsort((positions, -scores))
    first = np.unique(positions[order], return_index=True)[1]
    best = order[np.sort(first)[:k]]
    return positions[best], scores[best]


def build_exact(vectors: NDArray[np.float32]) -> Any:
    """Builds the index that compares all vectors, `[items, dim]`."""
    found = faiss.IndexFlatIP(vectors.shape[1])
    found.add(np.ascontiguousarray(vectors, np.float32))
    return found


def use_one_thread() -> None:
    """Keeps the searches of the calling thread to it: requests run beside each other already."""
    faiss.omp_set_num_threads(1)
