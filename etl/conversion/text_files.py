"""Text files, plain or compressed, as their names say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from conf.errors import ConfigError, InputDataError

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
