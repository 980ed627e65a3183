"""The formats that files are converted between, how each is told apart, and text by compression."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.row_errors import refuse_unknown
from etl.tfrecord.types.policies import TypeOptions

_NO_TEXT_SUFFIXES = (".deflate", ".zlib")


def open_text_input(path: Path) -> pa.NativeFile:
    """Opens a file to read; `.gz` and the like are decompressed.

    Raises:
        ConfigError: The name is that of a compression that text files do not come in.
    """
    _check_name(path)
    return pa.input_stream(str(path), compression="detect")


def open_text_output(path: Path) -> pa.NativeFile:
    """Creates a file; it is compressed where its name says so.

    Raises:
        ConfigError: The name is that of a compression that text files do not come in.
    """
    _check_name(path)
    return pa.output_stream(str(path), compression="detect")


@contextlib.contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Makes an error of the block that is one of decompression name the file.

    Raises:
        InputDataError: The file does not decompress.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # the system's: no such file, no permission
            raise
        raise InputDataError(
            f"{path} does not decompress",
            received=str(error),
            fix="copy the file again, or give it a name without the compression's ending",
        ) from error


def _check_name(path: Path) -> None:
    if path.suffix.lower() in _NO_TEXT_SUFFIXES:
        raise ConfigError(
            "text files are not compressed that way",
            received=path.name,
            allowed="no compression, or .gz",
        )


Format = Literal["tfrecord", "parquet", "csv", "libsvm"]
FORMATS: tuple[Format, ...] = get_args(Format)

_SUFFIXES: Mapping[str, Format] = {
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".libsvm": "libsvm",
    ".svm": "libsvm",
}
_COMPRESSED = (".gz", ".deflate", ".zlib")

_VALUE_TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}


@dataclass(frozen=True)
class LibsvmColumns:
    """Names of the columns that a libsvm line becomes; `qid` only where lines have one."""

    label: str = "label"
    indices: str = "indices"
    values: str = "values"
    qid: str = "qid"


@dataclass(frozen=True)
class TextOptions:
    """How CSV is read and written.

    Attributes:
        separator: Between columns; None for a tab in `.tsv` files and a comma in others.
        list_separator: Between the values of a list column.
        nulls: Unquoted fields that are nulls, for example `NA`; an empty one always is.
    """

    separator: str | None = None
    list_separator: str = "|"
    nulls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the separators.

        Raises:
            ConfigError: One that a file could not be read by.
        """
        separator = self.separator
        if separator is not None and (len(separator.encode()) != 1 or separator in '"\r\n'):
            raise ConfigError(
                "no such separator", received=repr(separator), allowed="one ASCII character"
            )
        if not self.list_separator:
            raise ConfigError("the list separator is empty", allowed="one or more characters")


@dataclass(frozen=True)
class ConvertOptions:
    """How files are converted.

    Attributes:
        shard: Record type of TFRecord files, read or written; compression of written ones.
        lowering: How columns become features.
        text: How CSV is read and written.
        libsvm: Names of a libsvm file's columns.
        types: Type by column name, over what a CSV or TFRecord input is inferred to hold: int64,
            float32, float64, string, binary, or `list<…>` of these.
    """

    shard: ShardOptions = field(default_factory=ShardOptions)
    lowering: TypeOptions = field(default_factory=TypeOptions)
    text: TextOptions = TextOptions()
    libsvm: LibsvmColumns = LibsvmColumns()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)


def detect_format(path: Path) -> Format:
    """Tells a file's format by the ending of its name, that of a compression left aside.

    Raises:
        ConfigError: The ending is none of those known.
    """
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise ConfigError(
        f"cannot tell the format of {path} by its name",
        received=suffix or "no ending",
        allowed=", ".join(_SUFFIXES),
        fix="name it: --from or --to with " + ", ".join(FORMATS),
    )


def list_inputs(path: Path, wanted: Format | None) -> list[Path]:
    """Lists the files of an input in the order of their names.

    Args:
        path: A file, or a directory with files of one format; hidden ones are left out.
        wanted: Format of the files; None to tell by their names.

    Raises:
        ConfigError: Nothing is there, or a directory holds several formats.
    """
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    if not files:
        raise ConfigError(
            "there is nothing to convert",
            received=path if path.is_dir() else f"{path} (does not exist)",
            allowed="a file, or a directory with files",
        )
    if wanted is None:
        found = {detect_format(file) for file in files}
        if len(found) > 1:
            raise ConfigError(
                f"{path} holds files of several formats",
                received=", ".join(sorted(found)),
                fix="give one file, or a directory of one format",
            )
    return files


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part[0] in "._" for part in path.relative_to(root).parts)


def parse_type(text: str) -> pa.DataType:
    """Parses the name of a column type, such as `int64` or `list<string>`.

    Raises:
        ConfigError: No such type.
    """
    match = re.fullmatch(r"list<(\w+)>", text.strip())
    name = match[1] if match else text.strip()
    if name not in _VALUE_TYPES:
        raise ConfigError(
            "unknown column type",
            received=text,
            allowed=f"{', '.join(_VALUE_TYPES)}, list<…> of these",
            fix=did_you_mean(name, _VALUE_TYPES),
        )
    return pa.list_(_VALUE_TYPES[name]) if match else _VALUE_TYPES[name]


def check_types(types: Mapping[str, pa.DataType], names: Sequence[str], path: Path) -> None:
    """Refuses types of columns that are not there.

    Raises:
        ConfigError: There is no such column.
    """
    missing = [name for name in types if name not in names]
    refuse_unknown(f"--types names columns that {path} does not have", missing, names)
