"""What a manifest may say: it is read from a file that anybody may have changed.

Readers size arrays and plans of epochs by it, so a wrong number could take all memory or for ever.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from conf.errors import InputDataError
from conf.schema import MOST_VALUES

if TYPE_CHECKING:
    from conf.manifest import FileInfo, Manifest, ShardInfo

RECORD_BYTES = 16
"""Bytes of the smallest record: TFRecord frames each by its length and two checksums."""
MOST_COMPRESSED = 1032
"""Bytes that a compressed one may become at most (DEFLATE, RFC 1951: 258 bytes of 2 bits)."""
MOST_NUMBER = 2**63 - 1
_CRC32C = re.compile(r"[0-9a-f]{8}")
_TEXTS = ("dataset_name", "dataset_version", "created_at", "record_type", "code_version")


def check_values(manifest: Manifest, origin: str) -> None:
    """Refuses a manifest with a value of another type or range, or a file that is listed twice.

    Args:
        manifest: The manifest.
        origin: Where it came from, for the message.

    Raises:
        InputDataError: There is one; names it.
    """
    for name in _TEXTS:
        if not isinstance(getattr(manifest, name), str):
            _refuse(origin, name, getattr(manifest, name), "text")
    if not isinstance(manifest.compression, str | None):
        _refuse(origin, "compression", manifest.compression, "text, or null")
    names = [split.name for split in manifest.splits]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        _refuse(origin, "splits", names, "names, each once")
    seen: set[str] = set()
    ratio = find_ratio(manifest.compression)
    for split in manifest.splits:
        for shard in split.shards:
            _check_file(origin, shard, seen)
            _check_rows(origin, shard, ratio)
    for file in manifest.other_files:
        _check_file(origin, file, seen)
    for name in ("read", "kept", "dropped", "drawn", "matched"):
        _check_counts(origin, f"counts.{name}", getattr(manifest.counts, name))
    _check_counts(origin, "vocabularies", manifest.vocabularies)
    lists = [spec.name for spec in manifest.schema.features if spec.is_list]
    for name in manifest.feature_lists or ():
        if name not in lists:
            _refuse(origin, "feature_lists", name, f"lists of the schema: {', '.join(lists)}")
    sizes = [shard.bytes for split in manifest.splits for shard in split.shards]
    _check_lengths(origin, manifest.statistics, min(max(sizes, default=0) * ratio, MOST_VALUES))


def find_ratio(compression: str | None) -> int:
    """Returns how many bytes a byte of a file may become at most."""
    return MOST_COMPRESSED if compression is not None else 1


def count_most_rows(size: int, ratio: int) -> int:
    """Returns how many records a file may hold at most.

    Args:
        size: Its bytes.
        ratio: What each may become, see `find_ratio`.
    """
    return size * ratio // RECORD_BYTES


def _check_file(origin: str, file: ShardInfo | FileInfo, seen: set[str]) -> None:
    if not isinstance(file.path, str):
        _refuse(origin, "a file's path", file.path, "text")
    if posixpath.normpath(file.path) != file.path:  # Another name of a file, maybe of one listed.
        _refuse(origin, "a file's path", file.path, posixpath.normpath(file.path))
    if file.path in seen:
        _refuse(origin, "a file that is listed twice", file.path, "each file once")
    seen.add(file.path)
    if not _is_count(file.bytes):
        _refuse(origin, f"bytes of {file.path}", file.bytes, "a whole number from 0 on")
    if not isinstance(file.crc32c, str) or not _CRC32C.fullmatch(file.crc32c):
        _refuse(origin, f"crc32c of {file.path}", file.crc32c, "8 hexadecimal digits")


def _check_rows(origin: str, shard: ShardInfo, ratio: int) -> None:
    if not _is_count(shard.rows):
        _refuse(origin, f"rows of {shard.path}", shard.rows, "a whole number from 0 on")
    most = count_most_rows(shard.bytes, ratio)
    if shard.rows > most:
        allowed = f"at most {most:,}: a record takes {RECORD_BYTES} bytes of {shard.bytes:,}"
        _refuse(origin, f"rows of {shard.path}", f"{shard.rows:,}", allowed)


def _check_lengths(origin: str, statistics: Any, most: int) -> None:
    """Refuses longest lists that no shard has room for: readers size arrays by them."""
    for split, features in statistics.items():
        for name, found in features.items():
            longest = found.get("length", {}).get("max")
            if longest is not None and not (_is_count(longest) and longest <= most):
                what = f"statistics.{split}.{name}.length.max"
                _refuse(origin, what, longest, f"a whole number from 0 to {most:,}, or null")


def _check_counts(origin: str, name: str, counts: Any) -> None:
    if not isinstance(counts, Mapping) or not all(map(_is_count, counts.values())):
        _refuse(origin, name, counts, "whole numbers from 0 on, by name")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_NUMBER


def _refuse(origin: str, what: str, received: Any, allowed: str) -> NoReturn:
    raise InputDataError(
        f"{origin} cannot be true: {what}",
        received=str(received)[:200],
        allowed=allowed,
        fix="the file was edited or damaged; roll back to an earlier version, or build again",
    )
