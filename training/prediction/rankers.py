"""What ranks items for rows: the vectors of a retrieval model, or the scores of a ranking model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import read_key_vocabulary, read_plan
from training.evaluation.item_index import (
    ItemIds,
    ItemIndex,
    TopK,
    build_item_index,
    check_finite,
    order_by_id,
    rank_top_k,
    read_item_features,
    score_cells,
)
from training.evaluation.metrics import Pairs
from training.evaluation.task_metrics import compile_scores
from training.evaluation.users_as_of import take_rows
from training.export.source_facts import find_pair_features
from training.input.batches import Batch, Features
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.prediction.answer_plan import find_task
from training.prediction.candidates import Candidates, find_tokens, read_candidates
from training.raw_inputs.files import RawFile

PAIRS_AT_ONCE = 1 << 16
"""Pairs of a row and an item that a ranking model scores in one call."""


@dataclass(frozen=True)
class NamedRows:
    """Rows by name.

    Attributes:
        key: `user`, `row` or `id`: what names a list.
        names: That of each row, `[rows]`; null leaves a user out.
        seen: Cells left out of what is ranked; None: no cell.
    """

    key: str
    names: pa.Array
    seen: Pairs | None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def are_named(self) -> NDArray[np.bool_]:
        """Which rows get a list, `[rows]`: all but users whose raw value is not known."""
        if self.key != "user":
            return np.ones(len(self), np.bool_)
        found: NDArray[np.bool_] = self.names.is_valid().to_numpy(zero_copy_only=False)
        return found


@dataclass(frozen=True)
class ListRows(NamedRows):
    """Rows that lists are made for.

    Attributes:
        features: Features of the rows.
        candidates: Cells to rank; None: the whole catalogue.
        numbers: Number of each row in its split, from 1, where a user may have several; None: the
            names tell rows apart.
    """

    features: Features
    candidates: Pairs | None = None
    numbers: pa.Array | None = None


class Ranker(ABC):
    """Ranks items for rows.

    Attributes:
        items: Ids of what is ranked: the catalogue, or the candidates.
        tokens: Their raw values, `[items]`.
        inputs: Features of a row that it reads.
    """

    items: ItemIds
    tokens: pa.Array
    inputs: tuple[str, ...]

    @abstractmethod
    def rank(self, rows: ListRows, k: int) -> TopK:
        """Returns the k best items of each row."""


class VectorRanker(Ranker):
    """Ranks by the vectors of a retrieval model.

    Args:
        trained: The run's model.
        model: The same.
        candidates: Items to rank; None: the catalogue.
    """

    def __init__(
        self, trained: TrainedModel, model: RetrievalModel, candidates: Candidates | None = None
    ) -> None:
        self._model, self.inputs = model, tuple(model.user_inputs)
        self._batch_size = trained.config.evaluation.batch_size
        if candidates is not None and candidates.features is not None:
            self._index = self._embed(candidates, candidates.features)
            self.items, self.tokens = self._index, candidates.tokens
            return
        index = build_item_index(model, trained.version_dir, trained.manifest, self._batch_size)
        if candidates is not None:
            columns = candidates.find_in(index)
            index = ItemIndex(index.ids[columns], index.vectors[columns])
        self._index = index
        self.items, self.tokens = index, _read_tokens(trained, index)

    def _embed(self, candidates: Candidates, features: Batch) -> ItemIndex:
        vectors = []
        for start in range(0, len(candidates), self._batch_size):
            rows = np.arange(start, min(start + self._batch_size, len(candidates)))
            part = take_rows({name: features[name] for name in self._model.item_inputs}, rows)
            vectors.append(np.asarray(self._model.embed_items(part), np.float32))
        return order_by_id(candidates.ids, np.concatenate(vectors))

    def rank(self, rows: ListRows, k: int) -> TopK:
        """Returns the k best items of each row.

        Raises:
            InputDataError: A vector is not finite.
        """
        features = {name: rows.features[name] for name in self.inputs}
        vectors = np.asarray(self._model.embed_users(features), np.float32)
        check_finite("user", np.arange(1, len(rows) + 1), vectors)
        if rows.candidates is None:
            return rank_top_k(vectors, self._index, k, rows.seen)
        pairs = rows.candidates
        scores = score_cells(vectors[pairs.rows], self._index.vectors[pairs.columns])
        return rank_pairs(pairs, scores, self.items, len(rows), k)


class PairRanker(Ranker):
    """Ranks by what a ranking model predicts of a row with each item in place of its own.

    Args:
        trained: The run's model.
        model: The same.
        task: Task whose score ranks; None: the first.
        candidates: Items to rank; None: the catalogue.

    Raises:
        ConfigError: There is no such task, the dataset has no items, or a feature is made of the
            item and of something else, so that it is not known for other items.
    """

    def __init__(
        self,
        trained: TrainedModel,
        model: RankingModel,
        task: str | None = None,
        candidates: Candidates | None = None,
    ) -> None:
        self._task = find_task({one.name: one for one in model.tasks}, task)
        manifest = trained.manifest
        key = manifest.require_key("item")
        _refuse_crosses(trained, model)
        of_items = [n for n in model.inputs if manifest.schema[n].role == "item"]
        self.inputs = tuple(name for name in model.inputs if name not in of_items)
        self._compute = compile_scores(model)
        if candidates is not None and candidates.features is not None:
            self.items, self.tokens = ItemIds(candidates.ids), candidates.tokens
            self._columns = {name: candidates.features[name] for name in of_items}
            return
        names = tuple(dict.fromkeys((key, *of_items)))
        batch_size = trained.config.evaluation.batch_size
        items, columns = read_item_features(trained.version_dir, manifest, names, batch_size)
        if candidates is not None:
            found = candidates.find_in(items)
            items, columns = ItemIds(items.ids[found]), take_rows(columns, found)
        self.items, self.tokens = items, _read_tokens(trained, items)
        self._columns = {name: columns[name] for name in of_items}

    def rank(self, rows: ListRows, k: int) -> TopK:
        """Returns the k best items of each row.

        Raises:
            InputDataError: A score is no number.
        """
        if rows.candidates is not None:
            logits = self._score(rows.features, rows.candidates)
            found = rank_pairs(rows.candidates, logits, self.items, len(rows), k)
        else:
            found = rank_all(partial(self._score_grid, rows.features), self.items, rows, k)
        return finish_scores(found) if self._task.is_binary else found

    def _score_grid(self, features: Features, rows: slice) -> NDArray[np.float32]:
        cells = np.arange((rows.stop - rows.start) * len(self.items))
        found, columns = np.divmod(cells, len(self.items))
        return self._score(features, Pairs(found + rows.start, columns))

    def _score(self, features: Features, pairs: Pairs) -> NDArray[np.float32]:
        parts = [np.zeros(0, np.float32)]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            batch = {name: tf.gather(features[name], pairs.rows[part]) for name in self.inputs}
            for name, column in self._columns.items():
                batch[name] = tf.gather(column, pairs.columns[part])
            parts.append(np.asarray(self._compute(batch)[self._task.name], np.float32))
        logits = np.concatenate(parts)
        check_order(self._task.name, logits)
        return logits


def check_order(task: str, scores: NDArray[np.float32]) -> None:
    """Refuses scores that have no order.

    Raises:
        InputDataError: One is no number.
    """
    if np.isnan(scores).any():
        raise InputDataError(
            f"the model's scores of task {task} are no numbers",
            received=f"{int(np.isnan(scores).sum())} of {len(scores)} pairs are NaN",
            fix="look for numbers in the features that are not finite",
        )


def finish_scores(found: TopK) -> TopK:
    """Returns lists with probabilities for log-odds, whose order stays: near 1 they would tie."""
    return TopK(found.ids, tf.sigmoid(found.scores).numpy())


ScoreGrid = Callable[[slice], NDArray[np.float32]]
"""From some rows to the scores of each with every item, flat: `[rows * items]`."""


def rank_all(score: ScoreGrid, items: ItemIds, rows: NamedRows, k: int) -> TopK:
    """Returns the k best of all items for each row.

    All pairs are scored, also those that are left out then: how many they are does not change the
    last digit of the others.

    Args:
        score: Scores rows, as many at a time as `PAIRS_AT_ONCE` allows.
        items: The items.
        rows: What is ranked for, with the cells that are left out.
        k: Length of a list.
    """
    parts = []
    step = max(1, PAIRS_AT_ONCE // len(items))
    for start in range(0, len(rows), step):
        count = min(step, len(rows) - start)
        logits = score(slice(start, start + count))
        kept = np.ones(len(logits), bool)
        if rows.seen is not None:
            inside = (rows.seen.rows >= start) & (rows.seen.rows < start + count)
            kept[(rows.seen.rows[inside] - start) * len(items) + rows.seen.columns[inside]] = False
        pairs = Pairs(*np.divmod(np.flatnonzero(kept), len(items)))
        parts.append(rank_pairs(pairs, logits[kept], items, count, k))
    return TopK(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def rank_pairs(
    pairs: Pairs, scores: NDArray[np.float32], items: ItemIds, rows: int, k: int
) -> TopK:
    """Returns the k best items of each row; equal scores are in the order of ids.

    Args:
        pairs: Cells that were scored.
        scores: `[pairs]`.
        items: The catalogue.
        rows: Number of rows.
        k: Length of a list; shorter ones are padded.
    """
    order = np.lexsort((pairs.columns, -scores, pairs.rows))
    of_row = pairs.rows[order]
    starts = np.searchsorted(of_row, np.arange(rows))
    position = np.arange(len(order)) - starts[of_row]
    kept = position < k
    ids = np.full((rows, k), PAD_ID, np.int64)
    best = np.full((rows, k), -np.inf, np.float32)
    ids[of_row[kept], position[kept]] = items.ids[pairs.columns[order][kept]]
    best[of_row[kept], position[kept]] = scores[order][kept]
    return TopK(ids, best)


def build_ranker(
    trained: TrainedModel, task: str | None = None, candidates: RawFile | None = None
) -> Ranker:
    """Builds what ranks items by a run's model.

    Args:
        trained: The run's model.
        task: Task of a ranking model whose score ranks; None: the first.
        candidates: File of the items to rank; None: the whole catalogue.

    Raises:
        ConfigError: The dataset has no items, or a task is named that the model does not have.
        InputDataError: The catalogue is damaged or empty, or a candidate is refused.
    """
    model = trained.model
    if isinstance(model, RankingModel):
        of_items = [n for n in model.inputs if trained.manifest.schema[n].role == "item"]
        found = read_candidates(trained, candidates, of_items) if candidates else None
        return PairRanker(trained, model, task, found)
    model = require_retrieval(model)
    found = read_candidates(trained, candidates, model.item_inputs) if candidates else None
    return VectorRanker(trained, model, found)


def _read_tokens(trained: TrainedModel, items: ItemIds) -> pa.Array:
    key = trained.manifest.require_key("item")
    vocabulary = read_key_vocabulary(trained.version_dir, trained.manifest, key)
    tokens = find_tokens(items.ids, vocabulary)
    lost = items.ids[tokens.is_null().to_numpy(zero_copy_only=False)]
    if len(lost):
        raise InputDataError(
            "the catalogue holds items that its vocabulary does not know",
            received=f"{len(lost)} items, first id {lost[0]}",
            fix="build the dataset again",
        )
    return tokens


def _refuse_crosses(trained: TrainedModel, model: RankingModel) -> None:
    plan = read_plan(trained.version_dir, trained.manifest)
    mixed = find_pair_features(trained.manifest, plan, model.inputs)
    if mixed:
        raise ConfigError(
            "the model reads a feature that is made of the item and of other columns: it is not "
            "known for other items than the row's own",
            received=", ".join(mixed),
            fix="score rows that hold it by --input, or train without it",
        )
