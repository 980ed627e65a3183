"""Embeddings as files: Parquet for machines, text for everything else, same rows in both.

    <name>.parquet   key (raw token), id int64, vector list<float32>
    <name>.txt       key<TAB>v1,v2,…   UTF-8, one line per row, no header

Numbers in the text are the shortest decimals that read back as the same float32. Inside a key,
backslash, tab, line feed and carriage return are written as \\\\, \\t, \\n and \\r.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


class EmbeddingWriter:
    """Writes both files row group by row group.

    Args:
        directory: Where the files go.
        name: Their name without suffix.
        key_type: Type of the keys, int64 or string.
    """

    def __init__(self, directory: Path, name: str, key_type: pa.DataType) -> None:
        self.schema = pa.schema(
            [
                pa.field("key", key_type, nullable=False),
                pa.field("id", pa.int64(), nullable=False),
                pa.field("vector", pa.list_(pa.float32()), nullable=False),
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
            vectors: `[rows, dim]` float32.
        """
        if not len(keys):
            return
        offsets = np.arange(0, vectors.size + 1, vectors.shape[1], dtype=np.int32)
        values = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
        lists = pa.ListArray.from_arrays(offsets, values)
        columns = [keys, pa.array(ids, pa.int64()), lists]
        self._parquet.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        numbers = pa.ListArray.from_arrays(offsets, values.cast(pa.string()))
        lines = pc.binary_join_element_wise(escape_keys(keys), pc.binary_join(numbers, ","), "\t")
        self._text.writelines(f"{line}\n" for line in lines.to_pylist())
        self.rows += len(keys)


def escape_keys(keys: pa.Array) -> Any:
    """Returns keys as text that holds neither tabs nor line breaks."""
    if pa.types.is_integer(keys.type):
        return keys.cast(pa.string())
    for character, escaped in ESCAPES:
        keys = pc.replace_substring(keys, character, escaped)
    return keys
