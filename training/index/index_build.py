"""Builds the index of a version's items, and adds items that the model was not trained on.

Beside `index.json` there are `exact.faiss` with all vectors, `near.faiss` of an approximate index,
and `items.parquet`: key, id (null where added), `column:<name>` of what lists are filtered by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from conf.artefacts.export import (
    EMBEDDINGS_DIR,
    ID,
    INDEX_CARD,
    INDEX_DIR,
    INDEX_FORMAT_VERSION,
    ITEMS_FILE,
    KEY,
    USERS_FILE,
    IndexKind,
    IndexOptions,
    list_files,
    read_card,
)
from conf.artefacts.run import write_json
from conf.errors import ConfigError, InputDataError
from conf.publication.entries import hold_numbers
from conf.storage.table_files import read_parquet
from training.index.item_columns import (
    COLUMN_PREFIX,
    ItemTable,
    align_columns,
    are_empty,
    read_items,
    read_table,
    read_vectors,
)
from training.index.known_entities import check_index, find_index, require_files
from training.index.vector_index import VectorIndex, choose_kind, fit_index, open_index, tune
from training.loading.loaded_model import LoadedModel
from training.raw_inputs.converter import RawColumns, separate_lists
from training.raw_inputs.files import take_columns
from training.raw_inputs.inputs import InputColumn, SourceNames

LENGTH, QUERIES = 50, 512  # Lists that are measured: how long, and of how many users.
BATCH_ROWS = 1024
ITEM_VECTORS = f"{EMBEDDINGS_DIR}/{ITEMS_FILE}"


def build_index(version: Path, options: IndexOptions) -> Path:
    _require_whole(version, EMBEDDINGS_DIR)
    with (
        hold_numbers(version / INDEX_DIR, INDEX_CARD) as held,
        held.next_entry(options.keep) as (staging, target),
    ):
        _build(staging, version, options)
    return target


def write_index(version: Path, options: IndexOptions) -> None:
    """Writes index 1 into a version that is not published yet."""
    _require_whole(version, EMBEDDINGS_DIR)
    _build(version / INDEX_DIR / "1", version, options)


def rebuild_index(version: Path, base: Path) -> int:
    """Writes index 1 into a version that is not published yet, like the newest one of another.

    Returns how many items were added to that one and are left out, as no index keeps features.
    """
    before = base / INDEX_DIR / str(find_index(base))
    about, known = check_index(before, read_card(base)), read_items(before / ITEMS_FILE)
    kind = None if about["kind"] == choose_kind(about["items"]) else IndexKind(about["kind"])
    items = read_items(version / ITEM_VECTORS)
    columns = align_columns(known.columns.add_column(0, KEY, known.keys), items.keys)
    _write_all(version / INDEX_DIR / "1", version, kind, items._replace(columns=columns))
    added = known.keys[len(known.ids) :].to_pylist()
    return len(set(added).difference(items.keys.to_pylist()))


def _require_whole(version: Path, read: str) -> dict[str, Any]:
    """Returns `export.json` of a version; files whose names begin with `read` are compared."""
    card = read_card(version)
    if ITEM_VECTORS not in card["files"]:
        problem = "only the items of a retrieval model can be indexed"
        raise ConfigError(problem, received=f"{card['name']}, a {card['kind']} model")
    files = {name: info for name, info in card["files"].items() if name.startswith(read)}
    require_files(f"the export {version}", version, files)
    return card


def _build(directory: Path, version: Path, options: IndexOptions) -> None:
    items = read_items(version / ITEM_VECTORS)
    if (path := options.items_file) is not None:
        columns = align_columns(read_table(path), items.keys)
        if are_empty(columns):
            problem = "the file of items names none of the model's items in its first column"
            raise InputDataError(problem, received=str(path))
        items = items._replace(columns=columns)
    _write_all(directory, version, options.kind, items)


def _write_all(directory: Path, version: Path, kind: IndexKind | None, items: ItemTable) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table({KEY: items.keys, ID: items.ids})  # Ids of items to come are null.
    for name in items.columns.column_names:
        table = table.append_column(f"{COLUMN_PREFIX}{name}", items.columns[name])
    _write(directory, version, fit_index(kind, items.vectors), table)


def _write(directory: Path, version: Path, index: VectorIndex, items: pa.Table) -> None:
    card, k = read_card(version), min(LENGTH, len(index))
    index, recall, milliseconds = tune(index, _draw_queries(version, card, index), k)
    index.write(directory)
    pq.write_table(items, directory / ITEMS_FILE)
    found = {
        "format_version": INDEX_FORMAT_VERSION,
        "export": {name: card[name] for name in ("name", "version", "fingerprint")},
        "kind": index.kind,
        "effort": index.effort,
        "items": len(index),
        "added": items[ID].null_count,
        "dim": index.exact.d,
        "k": k,
        "recall": recall,
        "milliseconds": milliseconds,
        "files": list_files(directory),
    }
    write_json(directory / INDEX_CARD, found)


def _draw_queries(version: Path, card: dict[str, Any], index: VectorIndex) -> NDArray[np.float32]:
    """Draws vectors of users, or where the export has none, of items; the same ones each time."""
    users = (card["embeddings"]["users"] or {}).get("rows", 0)
    rows = np.random.default_rng(0).permutation(users or len(index))[:QUERIES]
    if users:
        return read_vectors(read_parquet(version / EMBEDDINGS_DIR / USERS_FILE))[rows]
    return np.asarray(index.exact.reconstruct_batch(rows))


def add_items(version: Path, path: Path, keep: int | None = None) -> tuple[Path, int, int]:
    """Writes the next index of a published version with further items, embedded by its tower.

    The file's first column is the key, others are raw inputs and columns of the index. Returns the
    newest index, how many items were added, and how many of them it had already.
    """
    card = _require_whole(version, "")
    if find_index(version) is None:
        raise ConfigError("there is no index to add items to: build one", received=str(version))
    with hold_numbers(version / INDEX_DIR, INDEX_CARD) as held:
        base = version / INDEX_DIR / str(find_index(version))
        index = open_index(base, check_index(base, card), can_grow=True)
        items, table = read_parquet(base / ITEMS_FILE), read_table(path, as_text=True)
        rows = _shape_rows(table, items.schema, path)
        is_new = pc.invert(pc.is_in(rows[KEY], value_set=items[KEY].combine_chunks()))
        new = table.filter(is_new)
        if not len(new):
            return base, 0, len(table)
        with held.next_entry(keep) as (staging, target):
            index.add(embed_items(version, new))
            _write(staging, version, index, pa.concat_tables([items, rows.filter(is_new)]))
    return target, len(new), len(table) - len(new)


def _shape_rows(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """Returns new items as rows of the index: no id, and null in columns that the file lacks."""
    names, lacking = [f"{COLUMN_PREFIX}{name}" for name in table.column_names], pa.nulls(len(table))
    given = dict(zip(names, table.columns, strict=True))
    try:
        given[KEY] = table.column(0)
        rows = pa.table([given.get(one.name, lacking).cast(one.type) for one in schema], schema)
        if rows[KEY].null_count or len(pc.unique(rows[KEY])) < len(rows):
            raise pa.ArrowInvalid("an item without a key, or twice")
    except (pa.ArrowException, IndexError) as error:
        problem = "new items must have a key each in the first column, and values of these types"
        allowed = ", ".join(f"{one.name} {one.type}" for one in schema)
        raise InputDataError(problem, received=f"{path}: {error}", allowed=allowed) from error
    return rows


def embed_items(version: Path, items: pa.Table) -> NDArray[np.float32]:
    """Computes vectors, `[items, dim]`, of keys in the first column and raw inputs in others."""
    about = read_card(version)["signatures"]["item_embedding"]["inputs"]
    inputs, names = [InputColumn.from_json(one) for one in about], items.column_names
    given = SourceNames(tuple(inputs)).find_given(names)
    features = [one.name for one in inputs if names[0] not in (one.name, one.column)]
    if not given.intersection(features):
        problem = "new items need features: a model knows nothing of other keys than it has met"
        raise ConfigError(problem, received=", ".join(names), allowed=", ".join(features))
    for name in {one.name for one in inputs} - given:
        items = items.append_column(name, pa.nulls(len(items)))
    # Whatever the file is: a list that is text has its values between separators.
    reader = RawColumns(separate_lists(inputs, "|"), "the new items")
    read, model, found = reader.choose(items.column_names), LoadedModel(version), []
    for first in range(0, len(items), BATCH_ROWS):
        [batch] = items.slice(first, BATCH_ROWS).combine_chunks().to_batches()
        rows = reader.build(take_columns(batch, read), first + 1)
        found.append(model.call("item_embedding", rows.inputs)["embedding"])
    vectors: NDArray[np.float32] = np.concatenate(found)
    if not np.isfinite(vectors).all():
        raise InputDataError("the vectors of new items are not finite", received=str(version))
    return vectors
