"""The bytes of a file or of a part of it, inflated where it is compressed."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

Compression = Literal["GZIP", "ZLIB"]
Opener = Callable[[str | Path], BinaryIO]

_WBITS = {"GZIP": 31, "ZLIB": 15}
_PIECE_BYTES = 1 << 20


class ByteSource:
    """Reads a stream in pieces of bounded size; a damaged compressed stream ends early.

    Attributes:
        failure: What is wrong with the compressed stream, once its damage has been reached.
    """

    def __init__(
        self,
        file: BinaryIO,
        compression: Compression | None,
        *,
        limit: int | None = None,
        is_salvaging: bool = False,
    ) -> None:
        """Starts at the file's position.

        Args:
            file: Open file.
            compression: Its compression.
            limit: Bytes to read from the file at most.
            is_salvaging: Whether to get at every byte before the damage of a compressed stream.
        """
        self.failure: str | None = None
        self._file, self._left = file, limit
        self._wbits = _WBITS.get(compression or "", 0)
        self._inflate: Any = None if compression is None else zlib.decompressobj(self._wbits)
        self._pending, self._has_begun, self._is_salvaging = b"", False, is_salvaging

    def read(self, limit: int) -> bytes:
        """Returns at most `limit` bytes; none at the end of the stream, or of its sound part."""
        if self._inflate is None:
            return self._read_file(limit)
        if self.failure is not None:
            return b""
        try:
            return self._read_inflated(limit)
        except (zlib.error, EOFError) as error:
            self.failure = f"damaged compressed stream ({str(error) or 'it ends early'})"
            return b""

    def read_into(self, target: np.ndarray) -> int:
        """Fills a buffer, uint8 `[bytes]`, as far as `read` would; returns how many bytes came."""
        if self._inflate is None and self._left is None and hasattr(self._file, "readinto"):
            return self._file.readinto(memoryview(target)) or 0  # type: ignore[arg-type]
        piece = self.read(target.size)
        target[: len(piece)] = np.frombuffer(piece, np.uint8)
        return len(piece)

    def _read_file(self, limit: int) -> bytes:
        if self._left is None:
            return self._file.read(limit)
        data = self._file.read(min(limit, self._left))
        self._left -= len(data)
        return data

    def _read_inflated(self, limit: int) -> bytes:
        while True:
            data = self._pending or self._read_file(_PIECE_BYTES)
            if not data and (self._inflate.eof or not self._has_begun):
                return b""
            self._has_begun = True
            if self._inflate.eof:  # a further member of a concatenated stream
                self._inflate = zlib.decompressobj(self._wbits)
            piece = self._decompress(data, limit)
            self._pending = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                return piece
            if not data:  # nor was any output left inside the decompressor
                raise EOFError

    def _decompress(self, data: bytes, limit: int) -> bytes:
        earlier = self._inflate.copy() if self._is_salvaging else None
        try:
            return self._inflate.decompress(data, limit)
        except zlib.error as error:
            saved = b"" if earlier is None else _salvage(earlier, data)
            if not saved:
                raise
            self.failure = f"damaged compressed stream ({error})"
            return saved


def _salvage(inflate: Any, data: bytes) -> bytes:
    """What a stream gives before it turns out to be damaged, to the last byte."""
    pieces = []
    with contextlib.suppress(zlib.error):
        for position in range(len(data)):
            pieces.append(inflate.decompress(data[position : position + 1]))
    return b"".join(pieces)


def open_local(path: str | Path) -> BinaryIO:
    """Opens a local file."""
    return Path(path).open("rb", buffering=0)


def is_intact(
    path: str | Path, compression: Compression | None, opener: Opener = open_local
) -> bool:
    """Whether a file inflates without an error; one that is not compressed always does."""
    if compression is None:
        return True
    with opener(path) as file:
        source = ByteSource(file, compression)
        while source.read(_PIECE_BYTES):
            pass
    return source.failure is None
