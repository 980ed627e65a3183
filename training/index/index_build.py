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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import faiss
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
    IndexKind,
    IndexOptions,
    find_damage,
    find_damaged,
    list_files,
    read_card,
)
from conf.artefacts.run import read_json, write_json
from conf.errors import ConfigError, InputDataError
from conf.publication.numbered import hold_numbers
from conf.storage.table_files import read_parquet
from training.index.index_report import measure, read_queries, tune
from training.index.item_columns import COLUMN_PREFIX, align_columns, read_table, select_columns
from training.index.known_entities import (
    EXACT_FILE,
    NEAR_FILE,
    IncompleteVersionError,
    find_index,
    read_vectors,
)
from training.index.vector_index import EXACT_ITEMS, VectorIndex, build_exact

CELL_POINTS = 64
"""Items that k-means looks at for each cell; faiss warns below 39."""
LINKS, BUILD_EFFORT = 32, 80
"""Of a graph: neighbours of an item, and candidates for them."""


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
    with (
        hold_numbers(version / INDEX_DIR, INDEX_CARD) as held,
        held.next_entry(options.keep) as (staging, target),
    ):
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
    about, items = read_json(before / INDEX_CARD), read_parquet(_check_items(before))
    columns = select_columns(items).add_column(0, KEY, items[KEY])
    usual = about["kind"] == _choose_kind(about["items"])
    options = IndexOptions(
        kind=None if usual else IndexKind(about["kind"]),
        k=about["goal"]["k"],
        recall=about["goal"]["recall"],
    )
    added = items.filter(pc.is_null(items[ID]))[KEY].combine_chunks()
    known = read_parquet(version / EMBEDDINGS_DIR / ITEMS_FILE, [KEY])[KEY]
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
    table = read_parquet(version / EMBEDDINGS_DIR / ITEMS_FILE)
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
    about = {"goal": goal, **read_seconds(start), **(about or {})}
    write_numbered(directory, version, index, items, about)


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


def write_numbered(
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
        "score": card["score"],
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


def read_seconds(start: float) -> dict[str, float]:
    """Returns how long a build has taken, for the card of the index."""
    return {"build_seconds": round(time.monotonic() - start, 2)}
