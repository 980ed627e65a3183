"""Items that a model was not trained on, embedded by its tower and added to an index."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conf.artefacts.export import (
    INDEX_CARD,
    INDEX_DIR,
    ITEMS_FILE,
    KEY,
)
from conf.artefacts.run import read_json
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.publication.numbered import hold_numbers
from conf.storage.table_files import read_parquet
from training.index.index_build import read_seconds, require_whole, write_numbered
from training.index.item_columns import COLUMN_PREFIX, read_table
from training.index.known_entities import find_index, open_index
from training.raw_inputs.converter import DEFAULT_SEPARATOR, RawColumns
from training.raw_inputs.requests import read_names
from training.serving.models.served_version import Loading, ServedVersion

BATCH_ROWS = 1024


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
    index, items = open_index(base, card, can_grow=True), read_parquet(base / ITEMS_FILE)
    texts = [*_list_texts(card), *_list_text_columns(items.schema)]
    new, repeated = _read_new(read_table(path, texts), path, items)
    if not len(new):
        return base, 0, repeated
    with (
        hold_numbers(version / INDEX_DIR, INDEX_CARD) as held,
        held.next_entry(keep) as (staging, target),
    ):
        _refuse_newer(version, number)
        start, about = time.monotonic(), read_json(base / INDEX_CARD)
        vectors = embed_items(version, new)
        for one in (index.exact, index.near):
            if one is not None:
                one.add(vectors)
        items = pa.concat_tables([items, _shape_rows(new, items.schema)])
        write_numbered(
            staging, version, index, items, {"goal": about["goal"], **read_seconds(start)}
        )
    return target, len(new), repeated


def _refuse_newer(version: Path, number: int) -> None:
    if (index := find_index(version)) != number:
        raise UpstreamNotReadyError(
            "another index was written in the meantime",
            received=f"index {index} beside {number}",
            fix="run again: what it holds is added to",
        )


def _list_texts(card: Mapping[str, Any]) -> list[str]:
    """Names the raw inputs of the items' tower that are text, lists of any type among them."""
    inputs = card["signatures"]["item_embedding"]["inputs"]
    texts = [item for item in inputs if item["is_list"] or item["dtype"] == "string"]
    return [name for item in texts for name in (item["name"], item.get("column")) if name]


def _list_text_columns(schema: pa.Schema) -> list[str]:
    """Names the columns of an index that are text: `007` is not `7`."""
    return [
        field.name.removeprefix(COLUMN_PREFIX)
        for field in schema
        if field.name.startswith(COLUMN_PREFIX) and pa.types.is_string(field.type)
    ]


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
    key, names = items.column_names[0], read_names(inputs)
    others = [item["name"] for item in inputs if key not in (item["name"], item["column"])]
    if not {name for other in others for name in names.list_names(other)} & set(items.column_names):
        raise ConfigError(
            "new items need features: of an item that it was not trained on, a model knows nothing "
            "by the key",
            received=f"columns {', '.join(items.column_names)}",
            allowed=", ".join(others) or "none: this model reads nothing but the key",
            fix=None if others else "train a model that reads features of items",
        )
    for item in inputs:
        if not set(names.list_names(item["name"])) & set(items.column_names):
            items = items.append_column(item["name"], pa.nulls(len(items)))
    # Whatever the file is: a list that is text has its values between separators.
    reader = RawColumns(
        names.inputs,
        "the new items",
        DEFAULT_SEPARATOR,
        is_delimited=True,
    )
    read, found = reader.choose(items.column_names), []
    lists = {name for i in inputs if i["is_list"] for name in names.list_names(i["name"])}
    for start in range(0, len(items), BATCH_ROWS):
        part = items.slice(start, BATCH_ROWS).combine_chunks()
        columns = {name: part[name].combine_chunks() for name in read}
        columns |= {name: _read_lists(columns[name]) for name in lists & columns.keys()}
        given = reader.build(columns, start + 1)
        found.append(model.call("item_embedding", given)["embedding"])
    return np.concatenate(found)


def _read_lists(values: pa.Array) -> pa.Array:
    """Returns lists; one value alone may have been read as a number, none as empty text."""
    if pa.types.is_list(values.type) or pa.types.is_null(values.type):
        return values
    texts = values.cast(pa.string())
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
