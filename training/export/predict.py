"""Ranked lists for every user, as gzip'ed JSON lines.

    {"user": <raw token>, "items": [<raw token>, …], "scores": [<float>, …]}

One object per line and user, items best first. The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from conf.atomic_output import atomic_file
from conf.errors import ConfigError, InputDataError
from conf.run import RECOMMENDATIONS_FILE
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import (
    ItemIndex,
    TopK,
    UserBatch,
    build_item_index,
    rank_top_k,
    read_cells,
    read_user_vectors,
)
from training.input.vocabularies import Vocabulary, read_key_vocabulary


@dataclass(frozen=True)
class PredictionCounts:
    """Users of a file of recommendations.

    Attributes:
        users: Users with a list.
        users_outside_vocabulary: Users left out, as their raw token is not known.
    """

    users: int
    users_outside_vocabulary: int


def write_recommendations(
    trained: TrainedModel, k: int, mask_seen: bool
) -> tuple[Path, PredictionCounts]:
    """Writes the lists of all users; an earlier file is replaced when the new one is complete.

    Args:
        trained: The run's model.
        k: Length of a list; shorter where a user has met nearly everything.
        mask_seen: Whether items that the user has met are left out.

    Returns:
        The file, and what is in it.

    Raises:
        ConfigError: Seen items shall be left out, but the data set does not carry them.
        InputDataError: A record or vocabulary is damaged, or a vector is not finite.
    """
    if mask_seen and trained.manifest.keys.seen is None:
        raise ConfigError(
            "items that users have met cannot be left out: this dataset does not carry them",
            received="predict.mask_seen=true",
            fix="build it with `seen: true`, or pass --set predict.mask_seen=false",
        )
    manifest, version_dir = trained.manifest, trained.version_dir
    index = build_item_index(
        trained.model, version_dir, manifest, trained.config.evaluation.batch_size
    )
    item_tokens = _item_tokens(
        index, read_key_vocabulary(version_dir, manifest, manifest.require_key("item"))
    )
    vocabulary = read_key_vocabulary(version_dir, manifest, manifest.require_key("user"))
    target = trained.run_dir / RECOMMENDATIONS_FILE
    users = unknown = 0
    with (
        atomic_file(target) as unfinished,
        unfinished.open("wb") as raw,
        # No name and no time in the header: the same lists give the same bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as out,
    ):
        for batch in read_user_vectors(trained, seen=mask_seen):
            found = _rank(batch, index, k)
            lines = _format_lines(batch, found, index, item_tokens, vocabulary)
            out.write("".join(lines).encode())
            users += len(lines)
            unknown += len(batch.ids) - len(lines)
    return target, PredictionCounts(users, unknown)


def _rank(batch: UserBatch, index: ItemIndex, k: int) -> TopK:
    seen = None if batch.seen is None else read_cells(batch.seen, index)
    return rank_top_k(batch.vectors, index, k, seen)


def _format_lines(
    batch: UserBatch,
    found: TopK,
    index: ItemIndex,
    item_tokens: np.ndarray,
    vocabulary: Vocabulary | None,
) -> list[str]:
    """Returns one JSON line per user whose raw token is known."""
    user_tokens = _json_tokens(batch.ids, vocabulary)
    lengths = np.count_nonzero(found.ids != PAD_ID, axis=1)
    columns = index.columns_of(found.ids)
    # Arrow writes the shortest decimal that reads back as the same float32.
    scores = pa.array(found.scores.ravel()).cast(pa.string()).to_numpy(zero_copy_only=False)
    scores = scores.reshape(found.scores.shape)
    return [
        f'{{"user": {user}, "items": [{", ".join(item_tokens[columns[row, :length]])}], '
        f'"scores": [{", ".join(scores[row, :length])}]}}\n'
        for row, (user, length) in enumerate(zip(user_tokens, lengths, strict=True))
        if user is not None
    ]


def _item_tokens(index: ItemIndex, vocabulary: Vocabulary | None) -> np.ndarray:
    tokens = _json_tokens(index.ids, vocabulary)
    lost = [int(item) for item, token in zip(index.ids, tokens, strict=True) if token is None]
    if lost:
        raise InputDataError(
            "the catalogue holds items that its vocabulary does not know",
            received=f"{len(lost)} items, first id {lost[0]}",
            fix="build the dataset again",
        )
    return tokens


def _json_tokens(ids: np.ndarray, vocabulary: Vocabulary | None) -> np.ndarray:
    """Returns each id's raw token as JSON text, None where it has none; `[ids]` of objects."""
    tokens = ids.tolist() if vocabulary is None else vocabulary.take(ids).to_pylist()
    texts = np.empty(len(tokens), dtype=object)
    texts[:] = [None if token is None else json.dumps(token) for token in tokens]
    return texts
