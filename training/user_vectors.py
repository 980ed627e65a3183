"""Vectors of all users, from the `users` split: one record per user with the latest history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.input import build_eval_dataset, read_batches
from training.ranks import IntArray
from training.retrieval import USERS_SPLIT, check_finite
from training.trained import TrainedModel


@dataclass(frozen=True)
class UserBatch:
    """A batch of users.

    Attributes:
        ids: `[rows]` int64 user ids.
        vectors: `[rows, dim]` float32.
        seen: Ragged `[rows, None]` ids of the items met so far, or None where not asked for.
    """

    ids: IntArray
    vectors: NDArray[np.float32]
    seen: Any


def read_user_vectors(trained: TrainedModel, *, seen: bool) -> Iterator[UserBatch]:
    """Yields the users of the `users` split in the order of its shards.

    Args:
        trained: The model and its data set.
        seen: Whether to read the seen items, which the data set must carry.

    Raises:
        InputDataError: There is no `users` split, a record is damaged, or a vector is not finite.
    """
    model, manifest, version_dir = trained.model, trained.manifest, trained.version_dir
    user = manifest.require_key("user")
    ragged = (manifest.keys.seen,) if seen and manifest.keys.seen else ()
    names = tuple(dict.fromkeys((user, *model.user_inputs, *ragged)))
    dataset = build_eval_dataset(
        version_dir, manifest, USERS_SPLIT, trained.config.evaluation.batch_size, names, ragged
    )
    for batch in read_batches(dataset, version_dir, manifest, USERS_SPLIT):
        ids = np.asarray(batch[user], dtype=np.int64)
        vectors = np.asarray(
            model.embed_users({name: batch[name] for name in model.user_inputs}), np.float32
        )
        check_finite("user", ids, vectors)
        yield UserBatch(ids, vectors, batch[ragged[0]] if ragged else None)
