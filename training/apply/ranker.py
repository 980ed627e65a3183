"""The engine: ranked lists, scores and vectors of rows by the signatures of an exported model.

A retrieval model compares a row's vector with those of all items, exactly; a ranking model scores
pairs of a row and an item. Equal scores stand in the order of ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.artefacts.export import (
    DEFAULT_SIGNATURE,
    ENCODED,
    ENCODED_SUFFIX,
    RANK_ITEMS,
    Give,
)
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.schema import PAD_ID
from training.apply.export import NO_ITEMS, Arrays, Exported, Items
from training.evaluation.item_index import (
    ItemIds,
    Pairs,
    TopK,
    check_finite,
    rank_top_k,
    score_cells,
    take_top,
)
from training.evaluation.metrics import IntArray

SCORE = "score"
"""Name of the score of a retrieval model: the dot product of a row's user and its item."""
PAIRS_AT_ONCE = 1 << 16
"""Pairs of a row and an item that are scored in one call."""
Floats = NDArray[np.float32]
_LEAST = np.finfo(np.float32).min
"""Below it, at minus infinity, is what a list leaves out."""


@dataclass(frozen=True)
class RowInputs:
    """Rows as signatures take them."""

    arrays: Arrays  # by input name, a row each
    is_encoded: bool = False  # whether these are what records hold, rather than raw values

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, rows: IntArray | slice) -> RowInputs:
        """Returns some of the rows."""
        return RowInputs({n: v[rows] for n, v in self.arrays.items()}, self.is_encoded)

    def name_signature(self, signature: str) -> str:
        """Returns the name of a signature's form that takes these rows."""
        return name_signature(signature, self.is_encoded)


def name_signature(signature: str, is_encoded: bool) -> str:
    """Returns the name of a signature's form of raw values, or of what records hold."""
    if not is_encoded:
        return signature
    return ENCODED if signature == DEFAULT_SIGNATURE else f"{signature}{ENCODED_SUFFIX}"


class Ranker:
    """Applies a model to rows; a task of a ranking model orders items, by default the first."""

    def __init__(
        self, export: Exported, task: str | None = None, items: Items | None = None
    ) -> None:
        self.export, self.items = export, items or NO_ITEMS
        self.tasks = {one["name"]: one for one in export.card.get("outputs", ())}
        self.task = task or next(iter(self.tasks), SCORE)
        if task is not None and task not in self.tasks:
            allowed = ", ".join(self.tasks) or "no task: a retrieval model has none"
            raise ConfigError("the model has no such task", received=task, allowed=allowed,
                              fix=did_you_mean(task, self.tasks))  # fmt: skip

    def embed(self, rows: RowInputs, side: Give = Give.USER_EMBEDDING) -> Floats:
        """Returns vectors `[rows, dim]`, `[rows, interests, dim]` of users with several."""
        [vectors] = self.export.call(rows.name_signature(side), rows.arrays).values()
        check_finite(side.split("_")[0], np.arange(1, len(rows) + 1), vectors)
        return np.asarray(vectors, np.float32)

    def score(self, rows: RowInputs) -> dict[str, Floats]:
        """Returns the scores of rows that hold an item each, `[rows]` or `[rows, dim]` by task."""
        if self.tasks:
            found = self.export.call(rows.name_signature(DEFAULT_SIGNATURE), rows.arrays)
            return {name: np.asarray(found[name], np.float32) for name in self.tasks}
        users, items = (self.embed(rows, s) for s in (Give.USER_EMBEDDING, Give.ITEM_EMBEDDING))
        return {SCORE: score_cells(users, items)}

    def order_items(self, rows: RowInputs, keys: np.ndarray) -> dict[str, Floats]:
        """Returns log-odds or values that items are ordered by, `[rows, items]` by task.

        `keys` are raw keys of each row's items, `[rows, items]`; unknown ones are scored as such.
        """
        given = {**rows.arrays, find_items_input(self.export.card): keys}
        found = self.export.call(rows.name_signature(RANK_ITEMS), given)
        return {name: np.asarray(found[name], np.float32) for name in self.tasks}

    def finish(self, task: str, order: Floats) -> Floats:
        """Returns the scores that a task's order stands for: probabilities of a binary one."""
        is_binary = task in self.tasks and self.tasks[task]["kind"] == "binary"
        return tf.sigmoid(order).numpy() if is_binary else order

    def rank(
        self,
        rows: RowInputs,
        k: int,
        candidates: Pairs | None = None,
        seen: Pairs | None = None,
    ) -> TopK:
        """Returns the best items of each row, at most `k`; shorter lists are padded.

        `candidates` are the cells of `items` that are ranked, each once; None: all items for each
        row, without the cells `seen`.
        """
        items, k = self.items, min(k, len(self.items))
        if not self.tasks:
            vectors = self.embed(rows)
            if candidates is None:
                return rank_top_k(vectors, items, k, seen)
            scores = score_cells(vectors[candidates.rows], items.vectors[candidates.columns])
            return rank_pairs(candidates, scores, items, len(rows), k)
        if candidates is None:
            found = self._rank_all(rows, k, seen)
        else:
            found = rank_pairs(candidates, self._order_pairs(rows, candidates), items, len(rows), k)
        # Of items that the export does not know the graph has given the probabilities themselves.
        return found if items.features else TopK(found.ids, self.finish(self.task, found.scores))

    def _rank_all(self, rows: RowInputs, k: int, seen: Pairs | None) -> TopK:
        items, ids, scores = self.items, [], []
        step = max(1, PAIRS_AT_ONCE // len(items))
        for start in range(0, len(rows), step):
            order = np.maximum(self._order_grid(rows.take(slice(start, start + step))), _LEAST)
            if seen is not None:
                own = (seen.rows >= start) & (seen.rows < start + step)
                order[seen.rows[own] - start, seen.columns[own]] = -np.inf
            best, columns = take_top(order, k)
            ids.append(np.where(np.isneginf(best), PAD_ID, items.ids[columns]))
            scores.append(best)
        return TopK(np.concatenate(ids), np.concatenate(scores))

    def _order_grid(self, rows: RowInputs) -> Floats:
        """Returns what orders all items for each row, `[rows, items]`."""
        count, items = len(rows), self.items
        if items.features is not None:
            cells = Pairs(*np.divmod(np.arange(count * len(items)), len(items)))
            return self._order_pairs(rows, cells).reshape(count, -1)
        parts = []
        for start in range(0, len(items), PAIRS_AT_ONCE):
            keys = items.tensor[start : start + PAIRS_AT_ONCE]
            orders = self.order_items(rows, np.broadcast_to(keys, (count, len(keys))))
            parts.append(orders[self.task])
        return self._check(np.concatenate(parts, axis=1))

    def _order_pairs(self, rows: RowInputs, pairs: Pairs) -> Floats:
        parts = [np.zeros(0, np.float32)]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            own, columns = rows.take(pairs.rows[part]), pairs.columns[part]
            if self.items.features is None:
                found = self.order_items(own, self.items.tensor[columns][:, np.newaxis])
            else:
                described = {name: v[columns] for name, v in self.items.features.items()}
                found = self.score(RowInputs({**own.arrays, **described}, is_encoded=True))
            parts.append(found[self.task].ravel())
        return self._check(np.concatenate(parts))

    def _check(self, order: Floats) -> Floats:
        """Refuses NaN; infinite log-odds have an order, and are 0 or 1 as probabilities."""
        if np.isnan(order).any():
            raise InputDataError(
                f"the model's scores of task {self.task} are no numbers",
                received=f"{int(np.isnan(order).sum())} of {order.size} pairs are NaN",
                fix="look for numbers in the features that are not finite",
            )
        return order


def find_items_input(card: Mapping[str, Any]) -> str:
    """Returns the name of the input that takes the keys of items to order."""
    given = card["signatures"][RANK_ITEMS]["inputs"]
    return str(next(item["name"] for item in given if "feature" not in item))


def rank_pairs(pairs: Pairs, orders: Floats, items: ItemIds, rows: int, k: int) -> TopK:
    """Ranks each row's candidates by their orders `[pairs]`, into lists `[rows, k]`."""
    order = np.lexsort((pairs.columns, -orders, pairs.rows))
    of_row = pairs.rows[order]
    starts = np.searchsorted(of_row, np.arange(rows))
    position = np.arange(len(order)) - starts[of_row]
    kept = position < k
    ids = np.full((rows, k), PAD_ID, np.int64)
    best = np.full((rows, k), -np.inf, np.float32)
    ids[of_row[kept], position[kept]] = items.ids[pairs.columns[order][kept]]
    best[of_row[kept], position[kept]] = orders[order][kept]
    return TopK(ids, best)
