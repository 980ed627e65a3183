"""Builds the index of a version's items, measures it, and adds items to it.

    DIR/<model>/<n>/index/<m>/
        exact.faiss     all vectors
        near.faiss      of an approximate index
        items.parquet   key, id (null where added), column:<name> of what lists are filtered by
        index.json      of which version it is, the report, checksums

An index is written under a hidden name and renamed when it is whole; earlier ones stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from conf.atomic_output import numbered_directory
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.export import (
    EMBEDDINGS_DIR,
    ID,
    INDEX_CARD,
    INDEX_DIR,
    INDEX_FORMAT_VERSION,
    ITEMS_FILE,
    KEY,
    IndexKind,
    IndexOptions,
    find_damage,
    find_damaged,
    list_files,
    read_card,
)
from conf.run import read_json, write_json
from training.scoring.column_values import to_whole
from training.scoring.input_columns import find_sources
from training.serving.errors import RequestError
from training.serving.index_report import measure, read_queries, tune
from training.serving.known import (
    COLUMN_PREFIX,
    EXACT_FILE,
    NEAR_FILE,
    IncompleteVersionError,
    align_columns,
    find_index,
    open_index,
    read_table,
    read_vectors,
    select_columns,
)
from training.serving.model_store import Loading, ServedVersion
from training.serving.tensors import build_array
from training.serving.vector_index import EXACT_ITEMS, VectorIndex, build_exact

CELL_POINTS = 64
"""Items that k-means looks at for each cell; faiss warns below 39."""
LINKS, BUILD_EFFORT = 32, 80
"""Of a graph: neighbours of an item, and candidates for them."""
BATCH_ROWS = 1024


def build_index(version: Path, options: IndexOptions | None = None) -> Path:
    """Builds the next index of a published version.

    Args:
        version: Directory of the version.
        options: How it is built.

    Returns:
        Directory of the index.

    Raises:
        ConfigError: The model retrieves no items, or the format of a file is unknown.
        InputDataError: A file is damaged.
        UpstreamNotReadyError: The version is not whole, or another process indexes it.
    """
    options = options or IndexOptions()
    require_whole(version)
    with numbered_directory(version / INDEX_DIR, options.keep) as (staging, target):
        _write_first(staging, version, options)
    return target


def write_index(version: Path, options: IndexOptions) -> None:
    """Writes index 1 into a version that is not published yet; see `build_index`."""
    require_whole(version)
    _write_first(_make_first(version), version, options)


def rebuild_index(version: Path, base: Path) -> Path:
    """Writes index 1 into a version that is not published yet, as the newest one of another is.

    Kind, goal and columns are the same. Items that were added to the other index, and are not of
    this version, are left out: an index keeps no features that their vectors could be made of.

    Args:
        version: Directory of the version; its `export.json` is written.
        base: Directory of a version that has an index.

    Returns:
        Directory of the index; `rebuilt` of its card says of what, and how many items it lacks.

    Raises:
        InputDataError: The index of the other version is damaged.
    """
    require_whole(version)
    before = base / INDEX_DIR / str(find_index(base))
    about, items = read_json(before / INDEX_CARD), pq.read_table(_check_items(before))
    columns = pa.table({KEY: items[KEY], **_columns_by_name(items)})
    usual = about["kind"] == _choose_kind(about["items"])
    options = IndexOptions(
        kind=None if usual else IndexKind(about["kind"]),
        k=about["goal"]["k"],
        recall=about["goal"]["recall"],
    )
    added = items.filter(pc.is_null(items[ID]))[KEY].combine_chunks()
    known = pq.read_table(version / EMBEDDINGS_DIR / ITEMS_FILE, columns=[KEY])[KEY]
    left_out = pc.invert(pc.is_in(added, value_set=known.combine_chunks()))
    rebuilt = {
        "version": base.name,
        "index": before.name,
        "added_items_left_out": int(pc.sum(left_out).as_py() or 0),
    }
    directory = _make_first(version)
    _write_first(directory, version, options, columns, {"rebuilt": rebuilt})
    return directory


def _make_first(version: Path) -> Path:
    directory = version / INDEX_DIR / "1"
    directory.mkdir(parents=True)
    return directory


def _check_items(index: Path) -> Path:
    """Returns the file of an index's items, which is as it was written."""
    files = {ITEMS_FILE: read_json(index / INDEX_CARD)["files"][ITEMS_FILE]}
    if damaged := find_damaged(index, files):
        raise InputDataError(
            f"the index {index}, which the next version's is to be like, is damaged",
            received=damaged,
            fix="build it anew by `sluice index --export` this version, then run again",
        )
    return index / ITEMS_FILE


def _columns_by_name(items: pa.Table) -> dict[str, pa.ChunkedArray]:
    columns = select_columns(items)
    return {name: columns[name] for name in columns.column_names}


def require_whole(version: Path) -> dict[str, Any]:
    """Returns `export.json` of a version of a retrieval model, all of whose files are there.

    Raises:
        ConfigError: The model retrieves no items.
        IncompleteVersionError: A file is missing, or shorter than it should be.
        InputDataError: The vectors are damaged.
    """
    card = read_card(version)
    if damage := find_damage(version):
        raise IncompleteVersionError(f"the export {version} is not whole", received=damage)
    if not card.get("embeddings", {}).get("items"):
        raise ConfigError(
            "only the items of a retrieval model can be indexed",
            received=f"{card['name']}, a {card['kind']} model",
            fix="export a retrieval model (model.kind: retrieval) of a dataset with items",
        )
    vectors = f"{EMBEDDINGS_DIR}/{ITEMS_FILE}"
    if damaged := find_damaged(version, {vectors: card["files"][vectors]}):
        raise InputDataError(f"the export {version} is damaged", received=damaged)
    return card


def _write_first(
    directory: Path,
    version: Path,
    options: IndexOptions,
    given: pa.Table | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes an index of all items of a version.

    Args:
        directory: Of the index.
        version: Of the version.
        options: How it is built.
        given: Columns of the items, the first one the key; None: those of the options' file.
        about: What its card says besides.
    """
    start = time.monotonic()
    table = pq.read_table(version / EMBEDDINGS_DIR / ITEMS_FILE)
    items = pa.table({KEY: table[KEY], ID: table[ID]})  # Ids of items to come are null.
    if options.items_file is not None:
        given = read_table(options.items_file)
    if given is not None:
        columns = align_columns(given, table[KEY].combine_chunks())
        if options.items_file is not None:
            _require_some(columns, options.items_file)
        for name in columns.column_names:
            items = items.append_column(f"{COLUMN_PREFIX}{name}", columns[name])
    index = fit_index(options.kind, read_vectors(table))
    goal = {"k": options.k, "recall": options.recall}
    _write(directory, version, index, items, {"goal": goal, **_time(start), **(about or {})})


def _require_some(columns: pa.Table, path: Path) -> None:
    if columns.num_columns and not any(c.null_count < len(c) for c in columns.columns):
        raise InputDataError(
            "the file of items names none of the model's items in its first column",
            received=str(path),
            fix="put the items' raw keys into the first column",
        )


def fit_index(kind: IndexKind | None, vectors: NDArray[np.float32]) -> VectorIndex:
    """Builds the index of some vectors; how far an approximate one looks is chosen later.

    Args:
        kind: None: by the number of vectors.
        vectors: `[items, dim]`.
    """
    exact, dim = build_exact(vectors), vectors.shape[1]
    kind = kind or _choose_kind(len(vectors))
    if kind == IndexKind.EXACT:
        return VectorIndex(exact)
    metric = faiss.METRIC_INNER_PRODUCT
    near: Any
    if kind == IndexKind.IVF:
        cells = 2 ** round(np.log2(4 * np.sqrt(len(vectors))))
        cells = max(1, min(cells, len(vectors) // CELL_POINTS))
        near = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, cells, metric)
        near.cp.max_points_per_centroid = CELL_POINTS
        near.cp.min_points_per_centroid = 1
        near.train(vectors)
    else:
        near = faiss.IndexHNSWFlat(dim, LINKS, metric)
        near.hnsw.efConstruction = BUILD_EFFORT
    near.add(vectors)
    return VectorIndex(exact, kind, near)


def _choose_kind(items: int) -> IndexKind:
    return IndexKind.EXACT if items <= EXACT_ITEMS else IndexKind.IVF


def _write(
    directory: Path,
    version: Path,
    index: VectorIndex,
    items: pa.Table,
    about: Mapping[str, Any],
) -> None:
    """Writes an index; `effort` is chosen where `about` has none."""
    card, k = read_card(version), min(about["goal"]["k"], len(index))
    queries = read_queries(version, index, items[ID].drop_null().to_numpy())
    if not index.effort:
        index = tune(index, queries.tuning, k, about["goal"]["recall"])
    report = measure(index, queries, k)
    faiss.write_index(index.exact, str(directory / EXACT_FILE))
    if index.near is not None:
        faiss.write_index(index.near, str(directory / NEAR_FILE))
    pq.write_table(items, directory / ITEMS_FILE)
    found = {
        "format_version": INDEX_FORMAT_VERSION,
        "export": {name: card[name] for name in ("name", "version", "fingerprint")},
        "score": "dot product of the user's and the item's embedding",
        "kind": index.kind,
        "effort": index.effort,
        "cells": index.near.nlist if index.kind == "ivf" else None,
        "items": len(index),
        "added": items[ID].null_count,
        "dim": index.dim,
        "columns": [n.removeprefix(COLUMN_PREFIX) for n in items.column_names[2:]],
        **about,
        "report": report,
        "faiss": faiss.__version__,
        "files": list_files(directory),
    }
    write_json(directory / INDEX_CARD, found)


def add_items(version: Path, path: Path, keep: int | None = None) -> tuple[Path, int, int]:
    """Adds items that the model was not trained on, by their features, as the next index.

    Args:
        version: Directory of a published version that has an index.
        path: File of items: the first column is the key, the others are raw inputs of the items'
            tower and columns of the index, by their names.
        keep: Versions of the index that are kept, the newest ones; None: all.

    Returns:
        Directory of the newest index, how many items were added, and how many it had already; they
        are left as they are. Where none is new, no index is written.

    Raises:
        ConfigError: There is no index, or the model knows items by their keys alone.
        InputDataError: The file or the index is damaged, or a value does not fit the model.
        UpstreamNotReadyError: The version is not whole, or another process indexes it.
    """
    card, number = require_whole(version), find_index(version)
    if number is None:
        raise ConfigError(
            "there is no index to add items to",
            received=str(version),
            fix="build one: `sluice index --export` this version",
        )
    base = version / INDEX_DIR / str(number)
    index, items = open_index(base, card, can_grow=True), pq.read_table(base / ITEMS_FILE)
    new, repeated = _read_new(read_table(path, _list_texts(card)), path, items)
    if not len(new):
        return base, 0, repeated
    with numbered_directory(version / INDEX_DIR, keep) as (staging, target):
        _refuse_newer(version, number)
        start, about = time.monotonic(), read_json(base / INDEX_CARD)
        vectors = embed_items(version, new)
        for one in (index.exact, index.near):
            if one is not None:
                one.add(vectors)
        items = pa.concat_tables([items, _shape_rows(new, items.schema)])
        _write(staging, version, index, items, {"goal": about["goal"], **_time(start)})
    return target, len(new), repeated


def _refuse_newer(version: Path, number: int) -> None:
    if (found := find_index(version)) != number:
        raise UpstreamNotReadyError(
            "another index was written in the meantime",
            received=f"index {found} beside {number}",
            fix="run again: what it holds is added to",
        )


def _time(start: float) -> dict[str, float]:
    return {"build_seconds": round(time.monotonic() - start, 2)}


def _list_texts(card: Mapping[str, Any]) -> list[str]:
    """Names the raw inputs of the items' tower that are text, lists of any type among them."""
    inputs = card["signatures"]["item_embedding"]["inputs"]
    return [item["name"] for item in inputs if item["is_list"] or item["dtype"] == "string"]


def _read_new(table: pa.Table, path: Path, items: pa.Table) -> tuple[pa.Table, int]:
    """Returns the rows of a file whose keys are not in the index, and how many others there are."""
    try:
        keys = table.column(0).combine_chunks().cast(items.schema.field(KEY).type)
    except (pa.ArrowException, IndexError) as error:
        raise InputDataError(
            "the first column of a file of new items must hold their keys",
            received=f"{path}: {error}",
            allowed=f"keys of type {items.schema.field(KEY).type}",
        ) from error
    if keys.null_count or len(pc.unique(keys)) < len(keys):
        raise InputDataError(
            "a file of new items must name each of them once, in its first column",
            received=f"{path}: {len(keys)} rows, {len(pc.unique(keys.drop_null()))} keys, "
            f"{keys.null_count} empty",
        )
    is_new = pc.invert(pc.is_in(keys, value_set=items[KEY].combine_chunks()))
    new = table.set_column(0, table.column_names[0], keys).filter(is_new)
    return new, len(table) - len(new)


def _shape_rows(new: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns new items as rows of the index: no id, and null in columns that the file lacks."""
    columns = [new.column(0), pa.nulls(len(new), pa.int64())]
    for field in list(schema)[2:]:
        name = field.name.removeprefix(COLUMN_PREFIX)
        if name not in new.column_names:
            columns.append(pa.nulls(len(new), field.type))
            continue
        try:
            columns.append(new[name].cast(field.type))
        except pa.ArrowException as error:
            raise InputDataError(
                f"column {name} of the new items does not fit the index",
                received=error,
                allowed=str(field.type),
            ) from error
    return pa.table(columns, schema=schema)


def embed_items(version: Path, items: pa.Table) -> NDArray[np.float32]:
    """Computes the vectors of items by the tower of a version.

    Args:
        version: Its directory.
        items: The first column is the key; others are raw inputs by their names. What is left out
            is missing.

    Raises:
        ConfigError: The model reads nothing but the key, or the file has nothing that it reads.
        InputDataError: A value does not fit.
    """
    model = ServedVersion(version, Loading(files=None))
    inputs = model.card["signatures"]["item_embedding"]["inputs"]
    key, items = items.column_names[0], _name_inputs(items, inputs)
    others = [item["name"] for item in inputs if key not in (item["name"], item["column"])]
    if not set(others) & set(items.column_names):
        raise ConfigError(
            "new items need features: of an item that it was not trained on, a model knows nothing "
            "by the key",
            received=f"columns {', '.join(items.column_names)}",
            allowed=", ".join(others) or "none: this model reads nothing but the key",
            fix=None if others else "train a model that reads features of items",
        )
    specs, found = model.find_specs("item_embedding"), []
    for start in range(0, len(items), BATCH_ROWS):
        part = items.slice(start, BATCH_ROWS)
        try:
            given = {i["name"]: build_array(i["name"], _read_values(part, i), specs[i["name"]], i)
                     for i in inputs}  # fmt: skip
            found.append(model.call("item_embedding", given)["embedding"])
        except (RequestError, TypeError, ValueError) as error:
            raise InputDataError(
                "a value of the new items does not fit the model",
                received=f"rows {start + 1} to {start + len(part)}: {error}",
            ) from error
    return np.concatenate(found)


def _read_values(table: pa.Table, item: Mapping[str, Any]) -> list[Any]:
    """Returns the raw values of an input; `|` separates values of a list that is text."""
    if item["name"] not in table.column_names:
        values: list[Any] = [None] * len(table)
    else:
        values = table[item["name"]].to_pylist()
    converts: dict[str, Callable[[Any], Any]] = {"string": str, "int64": _to_whole}
    convert = converts.get(item["dtype"], float)
    if not item["is_list"]:
        return [None if v is None else convert(v) for v in values]
    lists = [[None if v is None else convert(v) for v in _split_list(one)] for one in values]
    width = item["length"] or max(1, *map(len, lists))
    padding = item["pad_token"]
    if padding is None:
        padding = "" if item["dtype"] == "string" else 0
    return [one + [padding] * (width - len(one)) for one in lists]


def _name_inputs(items: pa.Table, inputs: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Returns a table whose columns have the names of inputs, not of the source's columns."""
    for name, column in find_sources(inputs).items():
        if column in items.column_names and name not in items.column_names:
            items = items.append_column(name, items[column])
    return items


def _to_whole(value: Any) -> int:
    """Returns a whole number; `int` would cut off what stands behind the point.

    Raises:
        ValueError: It is none.
    """
    return to_whole(value) if isinstance(value, float) else int(value)


def _split_list(value: Any) -> list[Any]:
    """Returns a list; one value alone may have been read as a number, none as empty text."""
    if isinstance(value, list):
        return value
    return [] if value is None or value == "" else str(value).split("|")
