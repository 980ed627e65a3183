"""Rows of results as files, scores and ranked lists alike: Parquet, or JSON lines.

    <name>.parquet           a column per part of a row; lists are lists
    <name>.json, .jsonl      an object per line
    <name>.json.gz, .jsonl.gz   the same, compressed

Each holds the same content, and the same rows give the same bytes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from conf.errors import ConfigError

ROW_FORMATS = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""How the name of a file of results ends."""


def check_format(target: Path) -> None:
    """Refuses a file whose name does not say how it is written, or whose folder is not there."""
    if not target.name.endswith(ROW_FORMATS):
        raise ConfigError(
            "the format of the output is not known by the file's name",
            received=str(target),
            allowed=f"a name that ends in {', '.join(ROW_FORMATS)}",
        )
    if not target.parent.is_dir():
        raise ConfigError(
            "there is no folder for the output",
            received=str(target.parent),
            fix="make it, or name another one",
        )


class ResultWriter(ExitStack):
    """Writes rows into an unfinished file whose later name says the format."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__()
        self._is_parquet = name.endswith(".parquet")
        self._parquet: pq.ParquetWriter | None = None
        self._rendered: tuple[pa.Array, NDArray[np.object_]] | None = None
        self._file: Any = self.enter_context(path.open("wb"))
        if name.endswith(".gz"):  # No name and no time in it, so that the same give the same.
            packed = gzip.GzipFile("", "wb", 6, self._file, mtime=0)
            self._file = self.enter_context(packed)

    def write(self, columns: Mapping[str, pa.Array]) -> None:
        """Appends rows; the first column names them, others are numbers, lists, or of entries."""
        if self._is_parquet:
            table = pa.table({name: _decode(values) for name, values in columns.items()})
            if self._parquet is None:
                self._parquet = pq.ParquetWriter(self._file, table.schema)
                self.callback(self._parquet.close)
            self._parquet.write_table(table)
            return
        ids, *others = columns.values()
        texts = [render_ids(ids), *(self._render(values) for values in others)]
        names = [json.dumps(name, ensure_ascii=False) for name in columns]
        for row in zip(*texts, strict=True):
            pairs = zip(names, row, strict=True)
            line = ", ".join(f"{name}: {text}" for name, text in pairs)
            self._file.write(f"{{{line}}}\n".encode())

    def _render(self, values: pa.Array) -> NDArray[np.object_] | list[str]:
        """Returns values as JSON."""
        if pa.types.is_list(values.type):
            inner, ends = self._render(values.values), values.offsets.to_pylist()
            return [f"[{', '.join(inner[start:end])}]" for start, end in pairwise(ends)]
        if pa.types.is_dictionary(values.type):
            return self._render_entries(values.dictionary)[values.indices.to_numpy()]
        # Arrow writes the shortest decimals that read back as the same float32.
        found: NDArray[np.object_] = values.cast(pa.string()).to_numpy(zero_copy_only=False)
        return found

    def _render_entries(self, entries: pa.Array) -> NDArray[np.object_]:
        """Returns the entries of a dictionary as JSON; those of the batch before are kept."""
        if self._rendered is None or not self._rendered[0].equals(entries):
            self._rendered = (entries, render_ids(entries))
        return self._rendered[1]


def _decode(values: pa.Array) -> pa.Array:
    """Returns lists of entries of a dictionary as lists of values."""
    if pa.types.is_list(values.type) and pa.types.is_dictionary(values.type.value_type):
        return pa.ListArray.from_arrays(values.offsets, values.values.dictionary_decode())
    return values


def render_ids(ids: pa.Array) -> NDArray[np.object_]:
    """Returns ids as JSON: bytes as text, and what JSON does not know, such as times, too."""
    plain = (v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in ids.to_pylist())
    names = np.empty(len(ids), dtype=object)
    names[:] = [json.dumps(value, default=str, ensure_ascii=False) for value in plain]
    return names
