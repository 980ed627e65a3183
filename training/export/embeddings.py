"""Files beside a SavedModel: embeddings of a retrieval model, users and items.

    embeddings/<name>.parquet   key (raw token), id int64, vector list<float32>
    embeddings/<name>.txt       key<TAB>v1,v2,…   UTF-8, one line per row, no header
                                of users with several vectors: `vectors`, list<list<float32>>;
                                key<TAB>v1,v2,…;w1,w2,…
    items.parquet               of a ranking model: key (raw token), id
    users.parquet               key (raw token), an encoded feature each, `seen`: ids of items met

Parquet and text hold the same rows. Numbers in the text are the shortest decimals that read back as
the same float32. Inside a key, backslash, tab, line feed and carriage return are escaped as in C.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorflow as tf

from conf.artefacts.export import (
    FEATURE_PREFIX,
    ID,
    ITEMS_FILE,
    KEY,
    SEEN,
    USERS_FILE,
    VECTOR,
    VECTORS,
)
from conf.splits import USERS
from conf.storage.atomic_output import PRIVATE
from training.checkpoint.restore import TrainedModel
from training.encoders.source import find_aligned
from training.encoders.vocabularies import Vocabulary, read_key_vocabulary, read_plan
from training.evaluation.item_index import ItemIndex, read_item_features, read_user_vectors
from training.input.batches import build_eval_dataset, read_batches
from training.models.retrieval import require_retrieval

_SEPARATORS = (",", ";")
"""Of the numbers of a vector, and of the vectors of a row."""
_BUCKETS = ("hash:", "cross:")
"""Encodings whose ids several values share."""
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_log = logging.getLogger("sluice.training.export")


def write_embeddings(
    directory: Path, trained: TrainedModel, index: ItemIndex | None
) -> dict[str, Any]:
    """Writes the vectors of the items and users; returns what `export.json` says of them."""
    directory.mkdir()
    manifest, interests = trained.manifest, require_retrieval(trained.model).interests
    found: dict[str, Any] = {"dim": None, "items": None, "users": None}
    if index is not None:
        vocabulary = _read_vocabulary(trained, "item")
        rows, _ = write_vectors(directory / "items", vocabulary, [(index.ids, index.vectors)])
        found |= {"dim": int(index.vectors.shape[1]), "items": {"rows": rows}}
    if manifest.keys.user is not None and manifest.has_split(USERS):
        batches = ((batch.ids, batch.vectors) for batch in read_user_vectors(trained, seen=False))
        vocabulary, several = _read_vocabulary(trained, "user"), interests is not None
        rows, unknown = write_vectors(directory / "users", vocabulary, batches, several)
        found["users"] = {"rows": rows, "users_outside_vocabulary": unknown}
    columns, text = "key (raw token), id, vector (float32)", "key<TAB>v1,v2,…"
    if interests is not None:
        found["interests"] = interests
        columns += "; of users vectors (lists of float32)"
        text += ", of users with ; between vectors,"
    text += " with \\\\, \\t, \\n, \\r escaped in keys; no header"
    return {"columns": columns, "text": text, **found}


def _read_vocabulary(trained: TrainedModel, role: Literal["user", "item"]) -> Vocabulary | None:
    key = trained.manifest.require_key(role)
    return read_key_vocabulary(trained.version_dir, trained.manifest, key)


def _find_tokens(vocabulary: Vocabulary | None, ids: np.ndarray) -> pa.Array:
    """Returns the raw tokens of ids; null where one has none."""
    return pa.array(ids) if vocabulary is None else vocabulary.take(ids)


def write_vectors(
    stem: Path,
    vocabulary: Vocabulary | None,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    has_several: bool = False,
) -> tuple[int, int]:
    """Writes both files of batches of ids `[rows]` and vectors `[rows, dim]`, or several of a row.

    Returns how many rows were written, and how many were left out, as they have no token.
    """
    vector = pa.list_(pa.float32())
    schema = pa.schema(
        [
            pa.field(KEY, _find_tokens(vocabulary, np.arange(0)).type, nullable=False),
            pa.field(ID, pa.int64(), nullable=False),
            pa.field(VECTORS, pa.list_(vector), nullable=False)
            if has_several
            else pa.field(VECTOR, vector, nullable=False),
        ]
    )
    rows = unknown = 0
    with (
        pq.ParquetWriter(f"{stem}.parquet", schema) as parquet,
        Path(f"{stem}.txt").open("w", encoding="utf-8", newline="\n") as text,
    ):
        for ids, vectors in batches:
            keys = _find_tokens(vocabulary, ids)
            known = keys.is_valid().to_numpy(zero_copy_only=False)
            keys, kept = keys.drop_null(), int(known.sum())
            rows, unknown = rows + kept, unknown + len(ids) - kept
            if kept:
                lists, numbers = _build_lists(vectors[known])
                columns = [keys, pa.array(ids[known], pa.int64()), lists]
                parquet.write_table(pa.Table.from_arrays(columns, schema=schema))
                lines = pc.binary_join_element_wise(_escape_keys(keys), numbers, "\t")
                text.writelines(f"{line}\n" for line in lines.to_pylist())
    return rows, unknown


def _build_lists(vectors: np.ndarray) -> tuple[pa.Array, pa.Array]:
    """Returns vectors as lists, and as text."""
    lists = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
    texts = lists.cast(pa.string())
    for length, separator in zip(reversed(vectors.shape[1:]), _SEPARATORS, strict=False):
        offsets = np.arange(0, len(lists) + 1, length, dtype=np.int32)
        lists = pa.ListArray.from_arrays(offsets, lists)
        texts = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), separator)
    return lists, texts


def _escape_keys(keys: pa.Array) -> Any:
    if pa.types.is_integer(keys.type):
        return keys.cast(pa.string())
    for character, escaped in _ESCAPES:
        keys = pc.replace_substring(keys, character, escaped)
    return keys


def write_item_keys(directory: Path, trained: TrainedModel) -> int:
    """Writes the keys of the catalogue's items, ids ascending; returns how many."""
    key, batch_size = trained.manifest.require_key("item"), trained.config.evaluation.batch_size
    items, _ = read_item_features(trained.version_dir, trained.manifest, (key,), batch_size)
    keys = _find_tokens(_read_vocabulary(trained, "item"), items.ids)
    pq.write_table(pa.table({KEY: keys, ID: items.ids}), directory / ITEMS_FILE)
    return len(items)


def write_users(directory: Path, trained: TrainedModel) -> dict[str, Any] | None:
    """Writes the users of the vocabulary; returns what `export.json` says; None: there are none."""
    manifest = trained.manifest
    key = manifest.keys.user
    if key is None or not manifest.has_split(USERS):
        return None
    schema = manifest.schema
    if schema[key].vocabulary_size is not None and schema[key].encoding.startswith(_BUCKETS):
        _log.warning("no users are stored beside the model: buckets of %s hold several each", key)
        return None
    # What the user did is shown beside a list, whether or not the model reads it.
    histories = [name for name in manifest.histories if schema[name].role == "user"]
    read = [name for name in trained.model.inputs if schema[name].role == "user"]
    features = list(dict.fromkeys((*read, *histories)))
    unread = [name for name in histories if name not in read]
    rows = 0
    with ExitStack() as stack:
        writer = None
        for table in _read_users(trained, features, unread):
            if writer is None:
                (directory / USERS_FILE).touch(mode=PRIVATE)
                writer = pq.ParquetWriter(directory / USERS_FILE, table.schema)
                stack.enter_context(writer)
            writer.write_table(table)
            rows += len(table)
    groups = find_aligned(manifest, read_plan(trained.version_dir, manifest))
    aligned = [[name for name in group if name in read] for group in groups]
    return {
        "file": USERS_FILE,
        "rows": rows,
        "key": key,
        "features": features,
        "histories": histories,
        "aligned": [group for group in aligned if len(group) > 1],
        "has_seen": bool(manifest.keys.seen),
    }


def _read_users(
    trained: TrainedModel, features: list[str], unread: list[str]
) -> Iterator[pa.Table]:
    """Yields the users by batch; lists that the model does not read may have no bound."""
    manifest, version_dir = trained.manifest, trained.version_dir
    key, vocabulary = manifest.require_key("user"), _read_vocabulary(trained, "user")
    seen = [manifest.keys.seen] if manifest.keys.seen else []
    names, ragged = tuple(dict.fromkeys((key, *features, *seen))), (*seen, *unread)
    batch_size = trained.config.evaluation.batch_size
    dataset = build_eval_dataset(version_dir, manifest, USERS, batch_size, names, ragged)
    for batch in read_batches(dataset, version_dir, manifest, USERS):
        tokens = _find_tokens(vocabulary, np.asarray(batch[key], np.int64))
        columns = {f"{FEATURE_PREFIX}{name}": _to_arrow(batch[name]) for name in features}
        columns |= {SEEN: _to_arrow(batch[seen[0]])} if seen else {}
        yield pa.table({KEY: tokens, **columns}).filter(tokens.is_valid())


def _to_arrow(values: tf.Tensor | tf.RaggedTensor) -> pa.Array:
    if isinstance(values, tf.RaggedTensor):
        offsets = pa.array(values.row_splits.numpy(), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values.flat_values.numpy()))
    found = values.numpy()
    if found.ndim == 1:
        return pa.array(found)
    return pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
