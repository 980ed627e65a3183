"""Tables in checkpoints of TensorFlow: tensors `…-keys [n]` and `…-values [n, dim]`.

TFRA writes them, by object (`<path>/tables_of_<name>/<shard>/.ATTRIBUTES/table-keys`) and by name
(`<name>_mht_<n>of<shards>-keys`), and DeepRec (`<name>-keys`, `<name>/part_<n>-keys`). What was
read: checkpoints that TFRA 0.8.1 wrote, and DeepRec's page "Embedding Variable Export Format".
Counts and versions of keys, and state of optimizers, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from training.foreign_tables.bare_files import KEYS, VALUES, ForeignRows

TABLE_MARK = "#"
"""Between the path of a checkpoint and the name of a table in it."""
_TRACKED = re.compile(r"(?P<path>.+)/\d+/\.ATTRIBUTES/table-keys")
_NAMED = re.compile(r"(?P<path>.+?)(?:_mht_\d+of\d+|/part_\d+)?-keys")
_ROW_TYPES = (tf.float32, tf.float16, tf.bfloat16)


@dataclass(frozen=True)
class TensorPairs:
    """Tensors of a checkpoint that another system wrote: a pair for each shard of a table.

    Attributes:
        prefix: Path of the checkpoint, without `.index`.
        pairs: Names of the keys and of the rows.
    """

    prefix: str
    pairs: tuple[tuple[str, str], ...]

    def read(self, dim: int) -> Iterator[ForeignRows]:
        """Reads the rows, a pair after the other.

        Args:
            dim: Length of a row.

        Raises:
            InputDataError: Tensors are of another type or shape, or the checkpoint is damaged.
        """
        try:
            reader = tf.train.load_checkpoint(self.prefix)
            shapes = reader.get_variable_to_shape_map()
            types = reader.get_variable_to_dtype_map()
            for keys, rows in self.pairs:
                here = f"{self.prefix}, {rows}"
                found = [
                    f"{name} {types[name].name} {list(shapes[name])}"
                    for name in (keys, rows)
                    if name in shapes
                ]
                is_known = len(found) == 2 and types[keys] == tf.int64 and types[rows] in _ROW_TYPES
                if not is_known or list(shapes[rows]) != [*shapes[keys], dim]:
                    raise InputDataError(
                        f"{here}: no rows of this table",
                        received=", ".join(found),
                        allowed=f"keys int64 [n], and values float32, float16 or bfloat16 "
                        f"[n, {dim}]",
                        fix="give the table the row length of the checkpoint; text and int32 keys "
                        "are not read",
                    )
                values = reader.get_tensor(rows).astype(np.float32)
                yield ForeignRows(here, 0, reader.get_tensor(keys), values)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputDataError(f"{self.prefix} cannot be read", received=reason) from error


def find_checkpoint(path: Path) -> str | None:
    """Returns the prefix of a checkpoint: a SavedModel's, a folder's latest, or the path itself."""
    if path.suffix == ".index" and path.is_file():
        return str(path.with_suffix(""))
    for prefix in (path / "variables" / "variables", path):
        # The folder that one is in has no name.
        if prefix.name and prefix.with_name(f"{prefix.name}.index").is_file():
            return str(prefix)
    return tf.train.latest_checkpoint(str(path)) if (path / "checkpoint").is_file() else None


def pick_table(prefix: str, table: str) -> TensorPairs:
    """Finds the tensors of a table in a checkpoint.

    Args:
        prefix: Path of the checkpoint.
        table: Its name, or its whole path there; empty: the only one.

    Raises:
        ConfigError: There is no such table, or several.
        InputDataError: The checkpoint is damaged.
    """
    try:
        names = sorted(tf.train.load_checkpoint(prefix).get_variable_to_shape_map())
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputDataError(f"{prefix} cannot be read", received=reason) from error
    tables: dict[str, list[tuple[str, str]]] = {}
    for keys in names:
        match = _TRACKED.fullmatch(keys) or _NAMED.fullmatch(keys)
        rows = keys.removesuffix(KEYS) + VALUES
        if match is not None and rows in names:
            tables.setdefault(match["path"], []).append((keys, rows))
    fitting = [path for path in tables if table in ("", path, _short(path))]
    if len(fitting) == 1:
        return TensorPairs(prefix, tuple(tables[fitting[0]]))
    shown = ", ".join(f"{prefix}{TABLE_MARK}{name}" for name in tables)
    raise ConfigError(
        "the checkpoint holds several tables" if fitting else "the checkpoint has no such table",
        received=f"{prefix}{TABLE_MARK}{table}" if table else prefix,
        allowed=shown or "a checkpoint with tensors `…-keys` and `…-values`",
        fix=f"name one: <checkpoint>{TABLE_MARK}<table>"
        if tables
        else "TFRA's FileSystemSaver puts tables beside it: name TFRADynamicEmbedding/<table>",
    )


def _short(path: str) -> str:
    return path.rpartition("/")[2].removeprefix("tables_of_")
