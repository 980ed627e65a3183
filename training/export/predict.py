"""Ranked lists of items as gzip'ed JSON lines, by a model of either kind.

    {"user": <raw token>, "items": [<raw token>, …], "scores": [<float>, …]}

One object per row, items best first. Where rows have no user, `row` is the row's number, from 1;
rows of a file may bring an `id`. Scores are dot products, or of a ranking model what it predicts of
its task. The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from conf.atomic_output import atomic_file
from conf.encoders import EncoderPlan
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.run import RECOMMENDATIONS_FILE
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import (
    USERS_SPLIT,
    ItemIds,
    TopK,
    build_item_index,
    check_finite,
    rank_top_k,
    read_cells,
    read_item_features,
)
from training.evaluation.metrics import MISSING, Pairs
from training.evaluation.protocols import TRAIN_SPLIT, carries_seen, require_rows
from training.evaluation.task_metrics import compile_scores
from training.export.raw_rows import RawFile
from training.export.scores import read_file_rows, render_id
from training.input.batches import ROLE_OF_SPLIT, Batch, Features, build_eval_dataset, read_batches
from training.input.vocabularies import Vocabulary, read_key_vocabulary, read_plan
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, require_retrieval

TEST_SPLIT = "test"
PAIRS_AT_ONCE = 1 << 16
"""Pairs of a row and an item that a ranking model scores in one call."""

_log = logging.getLogger("sluice.training.predict")


@dataclass(frozen=True)
class PredictionCounts:
    """Users of a file of recommendations.

    Attributes:
        users: Users with a list.
        users_outside_vocabulary: Users left out, as their raw token is not known.
    """

    users: int
    users_outside_vocabulary: int


@dataclass(frozen=True)
class ListRows:
    """Rows that lists are made for.

    Attributes:
        key: `user`, `row` or `id`: what names a list.
        names: That of each row as JSON text, `[rows]` of objects; None leaves a row out.
        features: Features of the rows.
        candidates: Cells to rank; None: the whole catalogue.
        seen: Cells left out of the catalogue; None: no cell.
    """

    key: str
    names: NDArray[np.object_]
    features: Features
    candidates: Pairs | None = None
    seen: Pairs | None = None

    def __len__(self) -> int:
        return len(self.names)


class Ranker(ABC):
    """Ranks items for rows.

    Attributes:
        items: Ids of the catalogue.
        inputs: Features of a row that it reads.
    """

    items: ItemIds
    inputs: tuple[str, ...]

    @abstractmethod
    def rank(self, rows: ListRows, k: int) -> TopK:
        """Returns the k best items of each row."""


class VectorRanker(Ranker):
    """Ranks by the dot products of a retrieval model.

    Args:
        trained: The run's model.
        model: The same.
    """

    def __init__(self, trained: TrainedModel, model: RetrievalModel) -> None:
        self._model, self.inputs = model, tuple(model.user_inputs)
        self._index = build_item_index(
            model, trained.version_dir, trained.manifest, trained.config.evaluation.batch_size
        )
        self.items = self._index

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
        scores = np.einsum("pd,pd->p", vectors[pairs.rows], self._index.vectors[pairs.columns])
        return rank_pairs(pairs, scores, self.items, len(rows), k)


class PairRanker(Ranker):
    """Ranks by what a ranking model predicts of a row with each item in place of its own.

    Args:
        trained: The run's model.
        model: The same.
        task: Task whose score ranks; None: the first.

    Raises:
        ConfigError: There is no such task, the dataset has no items, or a feature is made of the
            item and of something else, so that it is not known for other items.
    """

    def __init__(self, trained: TrainedModel, model: RankingModel, task: str | None) -> None:
        self._task = _find_task(model, task)
        manifest = trained.manifest
        key = manifest.require_key("item")
        _refuse_crosses(trained, model, key)
        of_items = [n for n in model.inputs if manifest.schema[n].role == "item"]
        self.inputs = tuple(name for name in model.inputs if name not in of_items)
        names = tuple(dict.fromkeys((key, *of_items)))
        batch_size = trained.config.evaluation.batch_size
        self.items, columns = read_item_features(trained.version_dir, manifest, names, batch_size)
        self._columns = {name: columns[name] for name in of_items}
        self._compute = compile_scores(model)

    def rank(self, rows: ListRows, k: int) -> TopK:
        """Returns the k best items of each row.

        Raises:
            InputDataError: A score is no number.
        """
        if rows.candidates is not None:
            logits = self._score(rows.features, rows.candidates)
            found = rank_pairs(rows.candidates, logits, self.items, len(rows), k)
        else:
            found = self._rank_catalogue(rows, k)
        if not self._task.is_binary:
            return found
        # The order is that of the log-odds: probabilities near 1 would tie.
        return TopK(found.ids, tf.sigmoid(found.scores).numpy())

    def _rank_catalogue(self, rows: ListRows, k: int) -> TopK:
        parts = []
        step = max(1, PAIRS_AT_ONCE // len(self.items))
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            wanted = np.ones((count, len(self.items)), bool)
            if rows.seen is not None:
                inside = (rows.seen.rows >= start) & (rows.seen.rows < start + count)
                wanted[rows.seen.rows[inside] - start, rows.seen.columns[inside]] = False
            pairs = Pairs(*np.nonzero(wanted))
            moved = Pairs(pairs.rows + start, pairs.columns)
            logits = self._score(rows.features, moved)
            parts.append(rank_pairs(pairs, logits, self.items, count, k))
        return TopK(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.scores for part in parts]),
        )

    def _score(self, features: Features, pairs: Pairs) -> NDArray[np.float32]:
        parts = [np.zeros(0, np.float32)]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            batch = {name: tf.gather(features[name], pairs.rows[part]) for name in self.inputs}
            for name, column in self._columns.items():
                batch[name] = tf.gather(column, pairs.columns[part])
            parts.append(np.asarray(self._compute(batch)[self._task.name], np.float32))
        logits = np.concatenate(parts)
        if np.isnan(logits).any():
            raise InputDataError(
                f"the model's scores of task {self._task.name} are no numbers",
                received=f"{int(np.isnan(logits).sum())} of {len(logits)} pairs are NaN",
                fix="look for numbers in the features that are not finite",
            )
        return logits


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


def build_ranker(trained: TrainedModel, task: str | None = None) -> Ranker:
    """Builds what ranks items by a run's model.

    Raises:
        ConfigError: The dataset has no items, or a task is named that the model does not have.
        InputDataError: The catalogue is damaged or empty.
    """
    model = trained.model
    if isinstance(model, RankingModel):
        return PairRanker(trained, model, task)
    return VectorRanker(trained, require_retrieval(model))


def _find_task(model: RankingModel, name: str | None) -> Task:
    tasks = {task.name: task for task in model.tasks}
    if name is None:
        return model.tasks[0]
    if name not in tasks:
        raise ConfigError(
            "predict.task names no task of the model",
            received=name,
            allowed=", ".join(tasks),
            fix=did_you_mean(name, tasks),
        )
    return tasks[name]


def _list_columns(plan: EncoderPlan, feature: str) -> set[str]:
    column = plan.column(feature)
    return {column.column, *(raw.name for raw in column.inputs)}


def _refuse_crosses(trained: TrainedModel, model: RankingModel, key: str) -> None:
    plan = read_plan(trained.version_dir, trained.manifest)
    schema = trained.manifest.schema
    items = [key, *(spec.name for spec in schema.by_role("item"))]
    of_items = {column for name in items for column in _list_columns(plan, name)}
    mixed = [
        name
        for name in model.inputs
        if schema[name].role != "item" and of_items & _list_columns(plan, name)
    ]
    if mixed:
        raise ConfigError(
            "the model reads a feature that is made of the item and of other columns: it is not "
            "known for other items than the row's own",
            received=", ".join(mixed),
            fix="score rows that hold it by --input, or train without it",
        )


def choose_split(trained: TrainedModel) -> str:
    """Returns the split whose rows get lists where none is named.

    That is `test` where a ranking model is given candidates there, else `users` where the dataset
    has users and their records hold all that the model reads of a row, else `test`.
    """
    manifest, model = trained.manifest, trained.model
    has_users = manifest.keys.user is not None and manifest.has_split(USERS_SPLIT)
    if not isinstance(model, RankingModel):
        return USERS_SPLIT if has_users else TEST_SPLIT
    roles = {manifest.schema[name].role for name in model.inputs} - {"item"}
    if manifest.keys.candidates is not None or roles - {"user"} or not has_users:
        return TEST_SPLIT
    return USERS_SPLIT


def write_recommendations(
    trained: TrainedModel,
    k: int,
    mask_seen: bool,
    *,
    split: str | None = None,
    task: str | None = None,
    file: RawFile | None = None,
    target: Path | None = None,
) -> tuple[Path, PredictionCounts]:
    """Writes ranked lists; an earlier file is replaced when the new one is complete.

    Args:
        trained: The run's model.
        k: Length of a list; shorter where a user has met nearly everything.
        mask_seen: Whether items that the user has met are left out of the catalogue. Rows that
            belong to no user, and those of a file, have met none.
        split: Split whose rows get lists; None: see `choose_split`. Rows that hold candidates
            have these ranked, the row's own item among them; others the whole catalogue.
        task: Task of a ranking model whose score ranks; None: the first.
        file: Rows that get lists instead of those of a split.
        target: File to write; None: `recommendations.json.gz` of the run.

    Returns:
        The file, and what is in it.

    Raises:
        ConfigError: Seen items shall be left out, but the data set does not carry them.
        InputDataError: A record, row or vocabulary is damaged, or a vector is not finite.
    """
    split = split or choose_split(trained)
    if file is None:
        mask_seen = check_mask(trained, split, mask_seen)
    ranker = build_ranker(trained, task)
    if file is None:
        rows = read_split_lists(trained, ranker, split, mask_seen=mask_seen)
    else:
        rows = read_file_lists(trained, ranker, file)
    tokens = _item_tokens(
        ranker.items,
        read_key_vocabulary(
            trained.version_dir, trained.manifest, trained.manifest.require_key("item")
        ),
    )
    target = target or trained.run_dir / RECOMMENDATIONS_FILE
    total = written = 0
    with (
        atomic_file(target) as unfinished,
        unfinished.open("wb") as raw,
        # No name and no time in the header: the same lists give the same bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as out,
    ):
        for batch in rows:
            lines = _format_lines(batch, ranker.rank(batch, k), ranker.items, tokens)
            out.write("".join(lines).encode())
            total, written = total + len(batch), written + len(lines)
    return target, PredictionCounts(written, total - written)


def carries_candidates(trained: TrainedModel, split: str) -> bool:
    """Whether the rows of a split hold the items to rank."""
    name = trained.manifest.keys.candidates
    if name is None or split in ROLE_OF_SPLIT or split == TRAIN_SPLIT:
        return False
    found = trained.manifest.statistics.get(split, {}).get(name, {})
    return bool(found.get("values") != 0)  # Not known: as the keys say.


def check_mask(trained: TrainedModel, split: str, mask_seen: bool) -> bool:
    """Returns whether seen items can be left out as they shall be.

    Raises:
        ConfigError: The dataset, or the split, does not carry them.
    """
    manifest = trained.manifest
    if not mask_seen or carries_candidates(trained, split):
        return False
    if manifest.keys.user is None:
        _log.warning(
            "the rows of dataset %r belong to no user: no item is left out as seen",
            manifest.dataset_name,
        )
        return False
    if not carries_seen(manifest, split):
        is_built = manifest.keys.seen is not None
        raise ConfigError(
            "items that users have met cannot be left out: "
            + (f"split {split} does not carry them" if is_built else "this dataset does not carry "
               "them"),
            received="predict.mask_seen=true",
            fix=("choose another split" if is_built else "build it with `seen: true`")
            + ", or pass --set predict.mask_seen=false",
        )  # fmt: skip
    return True


def read_split_lists(
    trained: TrainedModel, ranker: Ranker, split: str, *, mask_seen: bool
) -> Iterator[ListRows]:
    """Yields the rows of a split that get lists, in the order of its shards.

    Args:
        trained: The model and its data set.
        ranker: What ranks.
        split: Name of the split.
        mask_seen: Whether to read the seen items, which the split must carry.

    Raises:
        ConfigError: The split's records do not hold what the model reads.
        InputDataError: The split is missing or empty, or a record is damaged.
    """
    manifest, version_dir = trained.manifest, trained.version_dir
    _check_split(trained, ranker, split)
    keys = manifest.keys
    ragged = [keys.seen] if mask_seen and keys.seen else []
    own = []
    if keys.candidates is not None and carries_candidates(trained, split):
        ragged, own = [keys.candidates], [manifest.require_key("item")]
    user = [] if keys.user is None else [keys.user]
    names = tuple(dict.fromkeys((*user, *ranker.inputs, *own, *ragged)))
    batch_size = trained.config.evaluation.batch_size
    dataset = build_eval_dataset(version_dir, manifest, split, batch_size, names, tuple(ragged))
    vocabulary = read_key_vocabulary(version_dir, manifest, keys.user) if keys.user else None
    first = 1
    for batch in read_batches(dataset, version_dir, manifest, split):
        rows = _name_rows(batch, keys.user, vocabulary, first)
        first += len(rows)
        if own:
            cells = _join_cells(batch, own[0], ragged[0], ranker.items)
            yield replace(rows, candidates=cells)
        elif ragged:
            yield replace(rows, seen=read_cells(batch[ragged[0]], ranker.items))
        else:
            yield rows


def _name_rows(
    batch: Batch, user: str | None, vocabulary: Vocabulary | None, first: int
) -> ListRows:
    if user is not None:
        return ListRows("user", _json_tokens(np.asarray(batch[user], np.int64), vocabulary), batch)
    value = next(iter(batch.values()))
    count = int(value.nrows() if isinstance(value, tf.RaggedTensor) else value.shape[0])
    return ListRows("row", _json_tokens(np.arange(first, first + count), None), batch)


def _check_split(trained: TrainedModel, ranker: Ranker, split: str) -> None:
    manifest = trained.manifest
    if split != USERS_SPLIT:
        require_rows(manifest, split)
        return
    others = [name for name in ranker.inputs if manifest.schema[name].role != "user"]
    if others:
        raise ConfigError(
            f"split {split!r} holds one record per user, and the model reads more of a row",
            received=", ".join(f"{name} (role {manifest.schema[name].role})" for name in others),
            fix="choose a split of events by --split, or give rows by --input",
        )


def _join_cells(batch: Batch, item: str, candidates: str, items: ItemIds) -> Pairs:
    """Returns each row's candidates and its own item, each once, as far as they are known."""
    given = read_cells(batch[candidates], items)
    own = items.columns_of(np.asarray(batch[item], np.int64))
    known = np.flatnonzero(own != MISSING)
    rows = np.concatenate((given.rows, known))
    columns = np.concatenate((given.columns, own[known]))
    codes = np.unique(rows * np.int64(len(items)) + columns)
    return Pairs(*np.divmod(codes, len(items)))


def read_file_lists(trained: TrainedModel, ranker: Ranker, file: RawFile) -> Iterator[ListRows]:
    """Yields the rows of a file that get lists; it holds the raw inputs of a row, not of items."""
    key = "row" if file.id_column is None else "id"
    for rows in read_file_rows(trained, file, ranker.inputs):
        names = np.empty(len(rows.ids), dtype=object)
        names[:] = [render_id(value) for value in rows.ids.to_pylist()]
        yield ListRows(key, names, rows.features)


def _format_lines(
    rows: ListRows, found: TopK, items: ItemIds, item_tokens: NDArray[np.object_]
) -> list[str]:
    """Returns one JSON line per row whose name is known."""
    lengths = np.count_nonzero(found.ids != PAD_ID, axis=1)
    columns = items.columns_of(found.ids)
    # Arrow writes the shortest decimal that reads back as the same float32.
    scores = pa.array(found.scores.ravel()).cast(pa.string()).to_numpy(zero_copy_only=False)
    scores = scores.reshape(found.scores.shape)
    return [
        f'{{"{rows.key}": {name}, "items": [{", ".join(item_tokens[columns[row, :length]])}], '
        f'"scores": [{", ".join(scores[row, :length])}]}}\n'
        for row, (name, length) in enumerate(zip(rows.names, lengths, strict=True))
        if name is not None
    ]


def _item_tokens(items: ItemIds, vocabulary: Vocabulary | None) -> NDArray[np.object_]:
    tokens = _json_tokens(items.ids, vocabulary)
    lost = [int(item) for item, token in zip(items.ids, tokens, strict=True) if token is None]
    if lost:
        raise InputDataError(
            "the catalogue holds items that its vocabulary does not know",
            received=f"{len(lost)} items, first id {lost[0]}",
            fix="build the dataset again",
        )
    return tokens


def _json_tokens(ids: np.ndarray, vocabulary: Vocabulary | None) -> NDArray[np.object_]:
    """Returns each id's raw token as JSON text, None where it has none; `[ids]` of objects."""
    tokens = ids.tolist() if vocabulary is None else vocabulary.take(ids).to_pylist()
    texts = np.empty(len(tokens), dtype=object)
    texts[:] = [None if token is None else json.dumps(token) for token in tokens]
    return texts
