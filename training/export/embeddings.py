"""Items and users of an export, and the files that hold them beside the SavedModel.

    embeddings/<name>.parquet   key (raw token), id int64, vector list<float32>
    embeddings/<name>.txt       key<TAB>v1,v2,…   UTF-8, one line per row, no header
                                of users with several vectors: `vectors`, list<list<float32>>;
                                key<TAB>v1,v2,…;w1,w2,…
    items.parquet               of a ranking model: key (raw token), id
    users.parquet               key (raw token), an encoded feature each, `seen`: ids of items met

The key of an item whose id is computed of it, as by a hash, is its id: no record holds another.
Parquet and text hold the same rows. Numbers in the text are the shortest decimals that read back as
the same float32. Inside a key, backslash, tab, line feed and carriage return are escaped as in C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorflow as tf
from numpy.typing import NDArray

from conf.artefacts.export import (
    EMBEDDINGS_DIR,
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
from conf.storage.table_files import to_arrow
from training.checkpoint.restore import TrainedModel
from training.encoders.source import find_aligned
from training.encoders.vocabularies import read_key_vocabulary, read_plan
from training.evaluation.item_index import (
    ItemIndex,
    build_item_index,
    check_finite,
    read_item_features,
)
from training.input.batches import Batch, read_split
from training.models.ranking import NetworkRankingModel
from training.models.retrieval import require_retrieval

_BUCKETS = ("hash:", "cross:")
"""Encodings whose ids several values share."""
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_log = logging.getLogger("sluice.training.export")


@dataclass(frozen=True)
class ExportedItems(ItemIndex):
    """The catalogue; a ranking model has encoded `features`, and `vectors` `[items, 0]`."""

    key: str
    keys: pa.Array
    features: Batch


def read_items(trained: TrainedModel) -> ExportedItems:
    """Reads the items that lists and scores are made of."""
    model, where = trained.model, (trained.version_dir, trained.manifest)
    key, find_tokens = trained.manifest.require_key("item"), _read_tokens(trained, "item")
    batch_size = trained.config.evaluation.batch_size
    if not isinstance(model, NetworkRankingModel):
        index = build_item_index(require_retrieval(model), *where, batch_size)
        return ExportedItems(index.ids, index.vectors, key, find_tokens(index.ids), {})
    of_items = [name for name in model.inputs if trained.manifest.schema[name].role == "item"]
    names = tuple(dict.fromkeys((key, *of_items)))
    items, columns = read_item_features(*where, names, batch_size)
    features = {name: columns[name] for name in of_items}
    none = np.zeros((len(items), 0), np.float32)
    return ExportedItems(items.ids, none, key, find_tokens(items.ids), features)


def _read_tokens(
    trained: TrainedModel, role: Literal["user", "item"]
) -> Callable[[np.ndarray], pa.Array]:
    """Returns what gives the tokens of ids: null for OOV, ids where there is no vocabulary."""
    key = trained.manifest.require_key(role)
    vocabulary = read_key_vocabulary(trained.version_dir, trained.manifest, key)
    return pa.array if vocabulary is None else vocabulary.take


def write_embeddings(
    directory: Path, trained: TrainedModel, items: ExportedItems | None
) -> dict[str, Any]:
    """Writes the vectors of the items and users; returns what `export.json` says of them."""
    folder, manifest = directory / EMBEDDINGS_DIR, trained.manifest
    folder.mkdir()
    interests = require_retrieval(trained.model).interests
    found: dict[str, Any] = {"dim": None, "items": None, "users": None}
    if items is not None:
        batch = (items.keys, items.ids, items.vectors)
        rows, _ = write_vectors(folder / "items", items.keys.type, [batch])
        found |= {"dim": int(items.vectors.shape[1]), "items": {"rows": rows}}
    if manifest.keys.user is not None and manifest.has_split(USERS):
        find_tokens = _read_tokens(trained, "user")
        users = read_user_vectors(trained, seen=False)
        batches = ((find_tokens(batch.ids), batch.ids, batch.vectors) for batch in users)
        kind = find_tokens(np.arange(0)).type
        rows, unknown = write_vectors(folder / "users", kind, batches, interests is not None)
        found["users"] = {"rows": rows, "users_outside_vocabulary": unknown}
    return found if interests is None else {**found, "interests": interests}


@dataclass(frozen=True)
class UserVectors:
    """A batch of users: ids, vectors `[rows, dim]` or `[rows, interests, dim]`, ragged seen ids."""

    ids: NDArray[np.int64]
    vectors: NDArray[np.float32]
    seen: Any


def read_user_vectors(trained: TrainedModel, *, seen: bool) -> Iterator[UserVectors]:
    """Yields the users of the `users` split in the order of its shards."""
    model = require_retrieval(trained.model)
    manifest, version_dir = trained.manifest, trained.version_dir
    user = manifest.require_key("user")
    ragged = (manifest.keys.seen,) if seen and manifest.keys.seen else ()
    names = tuple(dict.fromkeys((user, *model.user_inputs, *ragged)))
    batch_size = trained.config.evaluation.batch_size
    for batch in read_split(version_dir, manifest, USERS, batch_size, names, ragged):
        ids = np.asarray(batch[user], dtype=np.int64)
        vectors = np.asarray(
            model.embed_users({name: batch[name] for name in model.user_inputs}), np.float32
        )
        check_finite("user", ids, vectors, batch)
        yield UserVectors(ids, vectors, batch[ragged[0]] if ragged else None)


def write_vectors(
    stem: Path,
    key_type: pa.DataType,
    batches: Iterable[tuple[pa.Array, np.ndarray, np.ndarray]],
    has_several: bool = False,
) -> tuple[int, int]:
    """Writes both files of keys, ids `[rows]` and vectors `[rows, dim]`, or several of a row.

    Returns how many rows were written, and how many were left out, as their keys are null.
    """
    vector = pa.list_(pa.float32())
    last = (VECTORS, pa.list_(vector)) if has_several else (VECTOR, vector)
    columns = [(KEY, key_type), (ID, pa.int64()), last]
    schema = pa.schema([pa.field(*column, nullable=False) for column in columns])
    rows = unknown = 0
    with (
        pq.ParquetWriter(f"{stem}.parquet", schema) as parquet,
        Path(f"{stem}.txt").open("w", encoding="utf-8", newline="\n") as text,
    ):
        for keys, ids, vectors in batches:
            known = keys.is_valid().to_numpy(zero_copy_only=False)
            unknown += len(ids) - int(known.sum())
            if not known.any():
                continue
            keys, lists = keys.drop_null(), to_arrow(vectors[known].astype(np.float32))
            table = [keys, pa.array(ids[known], pa.int64()), lists]
            parquet.write_table(pa.Table.from_arrays(table, schema=schema))
            lines = pc.binary_join_element_wise(_escape_keys(keys), _render(lists), "\t")
            text.writelines(f"{line}\n" for line in lines.to_pylist())
            rows += len(keys)
    return rows, unknown


def _render(lists: pa.Array) -> pa.Array:
    """Returns numbers as text, with , between those of a vector and ; between vectors."""
    if not pa.types.is_list(lists.type):
        return lists.cast(pa.string())
    separator = ";" if pa.types.is_list(lists.type.value_type) else ","
    texts = pa.ListArray.from_arrays(lists.offsets, _render(lists.values))
    return pc.binary_join(texts, separator)


def _escape_keys(keys: pa.Array) -> Any:
    if pa.types.is_integer(keys.type):
        return keys.cast(pa.string())
    for character, escaped in _ESCAPES:
        keys = pc.replace_substring(keys, character, escaped)
    return keys


def write_item_keys(directory: Path, items: ExportedItems) -> dict[str, Any]:
    """Writes the keys of the items, ids ascending; returns what `export.json` says of them."""
    pq.write_table(pa.table({KEY: items.keys, ID: items.ids}), directory / ITEMS_FILE)
    return {"items": {"rows": len(items)}}


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
    tables = _read_users(trained, features, [name for name in histories if name not in read])
    first, rows, file = next(tables), 0, directory / USERS_FILE
    file.touch(mode=PRIVATE)
    with pq.ParquetWriter(file, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
            rows += len(table)
    groups = find_aligned(manifest, read_plan(trained.version_dir, manifest))
    aligned = [[name for name in group if name in read] for group in groups]
    return {
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
    key, find_tokens = manifest.require_key("user"), _read_tokens(trained, "user")
    seen = [manifest.keys.seen] if manifest.keys.seen else []
    names, ragged = tuple(dict.fromkeys((key, *features, *seen))), (*seen, *unread)
    batch_size = trained.config.evaluation.batch_size
    for batch in read_split(version_dir, manifest, USERS, batch_size, names, ragged):
        tokens = find_tokens(np.asarray(batch[key], np.int64))
        columns = {f"{FEATURE_PREFIX}{name}": _to_column(batch[name]) for name in features}
        columns |= {SEEN: _to_column(batch[seen[0]])} if seen else {}
        yield pa.table({KEY: tokens, **columns}).filter(tokens.is_valid())


def _to_column(values: tf.Tensor | tf.RaggedTensor) -> pa.Array:
    if isinstance(values, tf.RaggedTensor):
        offsets = pa.array(values.row_splits.numpy(), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values.flat_values.numpy()))
    found = values.numpy()
    if found.ndim == 1:
        return pa.array(found)
    return pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
