"""Files beside a SavedModel: embeddings of a retrieval model, and what is known of each user.

    embeddings/<name>.parquet   key (raw token), id int64, vector list<float32>
    embeddings/<name>.txt       key<TAB>v1,v2,…   UTF-8, one line per row, no header
                                of users with several vectors: `vectors`, list<list<float32>>;
                                key<TAB>v1,v2,…;w1,w2,…
    items.parquet               of a ranking model: key (raw token), id
    users.parquet               key (raw token), an encoded feature each, `seen`: ids of items met

Parquet is for machines, text for everything else; both hold the same rows. Numbers in the text are
the shortest decimals that read back as the same float32. Inside a key, backslash, tab, line feed
and carriage return are escaped as in C.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

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
from training.encoders.vocabularies import Vocabulary, read_key_vocabulary, read_plan
from training.evaluation.item_index import ItemIndex, read_item_features, read_user_vectors
from training.export.source_facts import find_aligned
from training.input.batches import build_eval_dataset, read_batches
from training.models.retrieval import require_retrieval

SEPARATORS = (",", ";")
"""Of the numbers of a vector, and of the vectors of a row."""
_BUCKETS = ("hash:", "cross:")
"""Encodings whose ids several values share."""
_log = logging.getLogger("sluice.training.export")
ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


class EmbeddingWriter:
    """Writes both files row group by row group.

    Args:
        directory: Where the files go.
        name: Their name without suffix.
        key_type: Type of the keys, int64 or string.
        has_several: Whether a row has several vectors.
    """

    def __init__(
        self, directory: Path, name: str, key_type: pa.DataType, has_several: bool = False
    ) -> None:
        vector = pa.list_(pa.float32())
        self.schema = pa.schema(
            [
                pa.field(KEY, key_type, nullable=False),
                pa.field(ID, pa.int64(), nullable=False),
                pa.field(VECTORS, pa.list_(vector), nullable=False)
                if has_several
                else pa.field(VECTOR, vector, nullable=False),
            ]
        )
        self.rows = 0
        self._parquet = pq.ParquetWriter(directory / f"{name}.parquet", self.schema)
        self._text = (directory / f"{name}.txt").open("w", encoding="utf-8", newline="\n")

    def __enter__(self) -> EmbeddingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parquet.close()
        self._text.close()

    def write(self, keys: pa.Array, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Appends rows.

        Args:
            keys: `[rows]` raw tokens, no null.
            ids: `[rows]` int64.
            vectors: `[rows, dim]` float32, or `[rows, interests, dim]` of several vectors.
        """
        if not len(keys):
            return
        lists = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
        texts = lists.cast(pa.string())
        for length, separator in zip(reversed(vectors.shape[1:]), SEPARATORS, strict=False):
            offsets = np.arange(0, len(lists) + 1, length, dtype=np.int32)
            lists = pa.ListArray.from_arrays(offsets, lists)
            texts = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), separator)
        columns = [keys, pa.array(ids, pa.int64()), lists]
        self._parquet.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        lines = pc.binary_join_element_wise(escape_keys(keys), texts, "\t")
        self._text.writelines(f"{line}\n" for line in lines.to_pylist())
        self.rows += len(keys)


def escape_keys(keys: pa.Array) -> Any:
    """Returns keys as text that holds neither tabs nor line breaks."""
    if pa.types.is_integer(keys.type):
        return keys.cast(pa.string())
    for character, escaped in ESCAPES:
        keys = pc.replace_substring(keys, character, escaped)
    return keys


def write_embeddings(
    directory: Path, trained: TrainedModel, index: ItemIndex | None
) -> dict[str, Any]:
    """Writes the vectors of the items and of the users that the dataset has.

    Args:
        directory: Where the files go.
        trained: A retrieval model.
        index: Its items; None: the dataset has none.

    Returns:
        What `export.json` says of them; `items` and `users` are None where there are none.

    Raises:
        InputDataError: A vocabulary or record is damaged, or a vector is not finite.
    """
    directory.mkdir()
    manifest = trained.manifest
    found: dict[str, Any] = {"dim": None, "items": None, "users": None}
    if index is not None:
        found["dim"] = int(index.vectors.shape[1])
        found["items"] = {"rows": _write_items(directory, trained, index)}
    if manifest.keys.user is not None and manifest.has_split(USERS):
        rows, unknown = _write_users(directory, trained)
        found["users"] = {"rows": rows, "users_outside_vocabulary": unknown}
    columns, text = "key (raw token), id, vector (float32)", "key<TAB>v1,v2,…"
    if (interests := require_retrieval(trained.model).interests) is not None:
        found["interests"] = interests
        columns += "; of users vectors (lists of float32)"
        text += ", of users with ; between vectors,"
    return {
        "columns": columns,
        "text": f"{text} with \\\\, \\t, \\n, \\r escaped in keys; no header",
        **found,
    }


def _write_items(directory: Path, trained: TrainedModel, index: ItemIndex) -> int:
    manifest = trained.manifest
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, manifest.require_key("item"))
    with EmbeddingWriter(directory, "items", _key_type(vocabulary)) as writer:
        _write_known(writer, vocabulary, index.ids, index.vectors)
        return writer.rows


def _write_users(directory: Path, trained: TrainedModel) -> tuple[int, int]:
    """Writes all users of the `users` split; returns rows written and users without a token."""
    manifest = trained.manifest
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, manifest.require_key("user"))
    unknown = 0
    several = require_retrieval(trained.model).interests is not None
    with EmbeddingWriter(directory, "users", _key_type(vocabulary), several) as writer:
        for batch in read_user_vectors(trained, seen=False):
            unknown += _write_known(writer, vocabulary, batch.ids, batch.vectors)
        return writer.rows, unknown


def _write_known(
    writer: EmbeddingWriter, vocabulary: Vocabulary | None, ids: np.ndarray, vectors: np.ndarray
) -> int:
    """Writes the rows that have a raw token; returns how many have none."""
    keys = pa.array(ids) if vocabulary is None else vocabulary.take(ids)
    known = keys.is_valid().to_numpy(zero_copy_only=False)
    writer.write(keys.drop_null(), ids[known], vectors[known])
    return int(np.count_nonzero(~known))


def _key_type(vocabulary: Vocabulary | None) -> pa.DataType:
    return pa.int64() if vocabulary is None else vocabulary.tokens.type


def write_item_keys(directory: Path, trained: TrainedModel) -> int:
    """Writes the keys of the catalogue's items, ids ascending; returns how many.

    Raises:
        InputDataError: The catalogue or the vocabulary is damaged.
    """
    manifest = trained.manifest
    key = manifest.require_key("item")
    batch_size = trained.config.evaluation.batch_size
    items, _ = read_item_features(trained.version_dir, manifest, (key,), batch_size)
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, key)
    keys = pa.array(items.ids) if vocabulary is None else vocabulary.take(items.ids)
    pq.write_table(pa.table({KEY: keys, ID: items.ids}), directory / ITEMS_FILE)
    return len(items)


def write_users(directory: Path, trained: TrainedModel) -> dict[str, Any] | None:
    """Writes the users of a dataset; those outside the vocabulary are left out.

    Args:
        directory: Where the file goes.
        trained: The run's model.

    Returns:
        What `export.json` says of it; None: the dataset has no users.

    Raises:
        InputDataError: A vocabulary or record is damaged.
    """
    manifest = trained.manifest
    key = manifest.keys.user
    if key is None or not manifest.has_split(USERS):
        return None
    spec = manifest.schema[key]
    if spec.vocabulary_size is not None and spec.encoding.startswith(_BUCKETS):
        _log.warning("no users are stored beside the model: buckets of %s hold several each", key)
        return None
    # What the user did is shown beside a list, whether or not the model reads it.
    histories = [n for n in manifest.histories if manifest.schema[n].role == "user"]
    read = [n for n in trained.model.inputs if manifest.schema[n].role == "user"]
    features = list(dict.fromkeys((*read, *histories)))
    seen = [manifest.keys.seen] if manifest.keys.seen else []
    names = tuple(dict.fromkeys((key, *features, *seen)))
    batch_size = trained.config.evaluation.batch_size
    ragged = (*seen, *(n for n in histories if n not in read))  # These may have no bound.
    dataset = build_eval_dataset(trained.version_dir, manifest, USERS, batch_size, names, ragged)
    vocabulary = read_key_vocabulary(trained.version_dir, manifest, key)
    groups = find_aligned(manifest, read_plan(trained.version_dir, manifest))
    aligned = [[name for name in group if name in read] for group in groups]
    writer, rows = None, 0
    try:
        for batch in read_batches(dataset, trained.version_dir, manifest, USERS):
            ids = np.asarray(batch[key], np.int64)
            tokens = pa.array(ids) if vocabulary is None else vocabulary.take(ids)
            columns = {
                KEY: tokens,
                **{f"{FEATURE_PREFIX}{n}": _to_arrow(batch[n]) for n in features},
            }
            columns |= {SEEN: _to_arrow(batch[seen[0]])} if seen else {}
            table = pa.table(columns).filter(tokens.is_valid())
            if writer is None:
                (directory / USERS_FILE).touch(mode=PRIVATE)
                writer = pq.ParquetWriter(directory / USERS_FILE, table.schema)
            writer.write_table(table)
            rows += len(table)
    finally:
        if writer is not None:
            writer.close()
    return {
        "file": USERS_FILE,
        "rows": rows,
        "key": key,
        "features": features,
        "histories": histories,
        "aligned": [group for group in aligned if len(group) > 1],
        "has_seen": bool(seen),
    }


def _to_arrow(values: tf.Tensor | tf.RaggedTensor) -> pa.Array:
    if isinstance(values, tf.RaggedTensor):
        offsets = pa.array(values.row_splits.numpy(), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values.flat_values.numpy()))
    found = values.numpy()
    if found.ndim == 1:
        return pa.array(found)
    return pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
