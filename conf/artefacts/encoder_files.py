"""The encoders' files of a dataset version: the plan, vocabularies and tables of statistics.

Both sides read them here: a file lies where the plan says, has the plan's checksum, and holds what
the plan describes. How CRC-32C is computed is given: the fast kernels belong to the record format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from conf.encoders import ENCODERS_FILE, EncoderPlan, TableSpec, TokenDType, VocabularySpec
from conf.errors import InputDataError
from conf.json_text import parse_json
from conf.paths import ReadablePath
from conf.storage.table_files import open_parquet

TOKEN_TYPES: dict[TokenDType, pa.DataType] = {"int64": pa.int64(), "string": pa.string()}
RETIRED_COLUMN = "is_retired"
_FIX = "restore the file, roll back to an earlier version, or build the dataset again"


@dataclass(frozen=True)
class EncoderFiles:
    """The encoders' files of a version.

    Attributes:
        directory: Where `encoders.json` lies.
        crc32c: CRC-32C of bytes.
    """

    directory: ReadablePath
    crc32c: Callable[[bytes], int]

    def read_table(self, spec: TableSpec, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads a table of statistics, a row for each id of its vocabulary.

        Args:
            spec: What the plan says of it.
            columns: Columns that are read; None: all.

        Raises:
            InputDataError: It is missing, damaged, elsewhere, or not the one that the plan names.
        """
        file, table = self._read_parquet(spec, columns)
        if len(table) != spec.rows or set(table.schema.types) != {pa.float32()}:
            received = f"{len(table)} rows of {', '.join(map(str, table.schema.types))}"
            raise _differs(file, "statistics", received, f"{spec.rows} rows of float32")
        return table

    def read_vocabulary(
        self, spec: VocabularySpec, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Reads a vocabulary: `token` and `id`, ascending without gaps, and what else it counts.

        Args:
            spec: What the plan says of it.
            columns: Columns that are read, `token` and `id` among them; None: all.

        Raises:
            InputDataError: It is missing, damaged, elsewhere, or not the one that the plan names.
        """
        file, table = self._read_parquet(spec, columns)
        tokens, first = table["token"], spec.first_token_id
        if tokens.type != TOKEN_TYPES.get(spec.token_dtype) or tokens.null_count:
            raise _differs(file, "token type", tokens.type, spec.token_dtype)
        ids = table["id"].to_numpy()
        if not np.array_equal(ids, np.arange(first, spec.size)):
            allowed = f"{first} to {spec.size - 1}, ascending"
            raise _differs(file, "size or ids", f"{len(ids)} ids", allowed)
        return table

    def _read_parquet(
        self, spec: VocabularySpec | TableSpec, columns: Sequence[str] | None
    ) -> tuple[ReadablePath, pa.Table]:
        data, file = self.read_bytes(spec), self.directory / spec.file
        return file, parse_parquet(data, str(file), columns)

    def read_bytes(self, spec: VocabularySpec | TableSpec) -> bytes:
        """Reads a file that the plan names, and checks its place and checksum.

        Raises:
            InputDataError: It is missing, damaged, elsewhere, or not the one that the plan names.
        """
        file = (self.directory / spec.file).resolve()
        if not file.is_relative_to(self.directory.resolve()):
            raise InputDataError(
                f"vocabulary {spec.name!r} names a file outside its own directory",
                received=spec.file,
                allowed=f"paths inside {self.directory}",
            )
        data = _read_bytes(file)
        if (checksum := f"{self.crc32c(data):08x}") != spec.file_crc32c:
            raise _differs(file, "checksum", checksum, spec.file_crc32c)
        return data


def read_plan_file(directory: ReadablePath) -> EncoderPlan:
    """Reads `encoders.json`.

    Raises:
        InputDataError: It is missing, damaged, or of a later format version.
    """
    file = directory / ENCODERS_FILE
    fix = "build the dataset again; earlier versions are untouched"
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputDataError(
            f"cannot read the encoders of a dataset: {file}", received=error, fix=fix
        ) from error
    if not isinstance(data, dict):
        raise InputDataError(f"{file} is no JSON object", received=type(data).__name__)
    try:
        return EncoderPlan.from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputDataError(f"{file} is not complete", received=repr(error), fix=fix) from error


def _read_bytes(file: ReadablePath) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputDataError(
            f"cannot read the vocabulary {file}", received=error.strerror, fix=_FIX
        ) from error


def parse_parquet(data: bytes, origin: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Returns what the bytes of a Parquet file hold.

    Raises:
        InputDataError: They are none, or lack a column.
    """
    try:
        file = open_parquet(pa.BufferReader(data))
        table = file.read(columns=None if columns is None else list(columns)).combine_chunks()
        return table if columns is None else table.select(list(columns))
    except (pa.ArrowException, OSError, KeyError) as error:
        what = "" if columns is None else f" with columns {', '.join(columns)}"
        raise InputDataError(
            f"{origin} is not a Parquet file{what}", received=str(error), fix=_FIX
        ) from error


def _differs(file: ReadablePath, what: str, received: Any, allowed: Any) -> InputDataError:
    return InputDataError(
        f"{file} is not the vocabulary that the encoders were written with: another {what}",
        received=received,
        allowed=allowed,
        fix=_FIX,
    )
