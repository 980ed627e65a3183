"""Damaged bytes set aside: a line of JSON per bad range, and the bytes themselves."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

from etl.tfrecord.recovery import BadRange

_LOGGER = logging.getLogger(__name__)
_LINES, _BYTES = ".jsonl", ".bin"


@dataclass(frozen=True)
class QuarantinedRange:
    """A range of a file that is no sound record.

    Attributes:
        file: The file.
        offset: Byte offset in the (uncompressed) file.
        length: Bytes.
        record: Number of records before it, from the start of the file or of the part that was
            read; None where earlier damage hides it.
        reason: What is wrong.
        saved_in: Name of the file that holds the bytes, in the same directory.
        saved_at: Where in that file.
    """

    file: str
    offset: int
    length: int
    record: int | None
    reason: str
    saved_in: str | None = None
    saved_at: int | None = None


class DamageLog:
    """Collects the bad ranges of one file or part of it; pieces of a range become one.

    Args:
        file: The file that is read.
        start: Where reading starts.
        directory: Where to set the bytes aside, or None to count only.
    """

    def __init__(self, file: str, start: int, directory: str | None) -> None:
        self._file, self._directory = file, directory
        key = hashlib.sha256(f"{file}\0{start}".encode()).hexdigest()[:16]
        self._stem = f"{Path(file).name}.{key}"
        self._saved: BinaryIO | None = None
        self._temporary = f".{self._stem}.{uuid.uuid4().hex}"
        self.ranges: list[QuarantinedRange] = []

    def __enter__(self) -> Self:
        return self

    def add(self, bad: BadRange) -> None:
        """Takes a bad range, or a further piece of the last one."""
        saved_at = self._save(bad.data.tobytes())
        if bad.continues:
            last = self.ranges[-1]
            self.ranges[-1] = replace(last, length=last.length + bad.data.size)
            return
        saved_in = None if saved_at is None else self._stem + _BYTES
        self.ranges.append(
            QuarantinedRange(self._file, bad.offset, bad.data.size, bad.record, bad.reason,
                             saved_in, saved_at)
        )  # fmt: skip

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publishes and warns, unless an attempt failed; names do not depend on the attempt.

        A reader that its consumer leaves early does not replace what was found before.
        """
        is_left_early = kind is not None and issubclass(kind, GeneratorExit)
        try:
            if self._directory is not None and (kind is None or is_left_early):
                self._publish(Path(self._directory), is_left_early)
            if self.ranges and (kind is None or is_left_early):
                _LOGGER.warning("%s", self.describe())
        finally:
            if self._saved is not None:
                self._saved.close()
                Path(self._saved.name).unlink(missing_ok=True)

    def describe(self) -> str:
        """Counts for a log line."""
        total = sum(bad.length for bad in self.ranges)
        first = self.ranges[0]
        where = f", set aside in {self._directory}" if self._directory else ""
        return (
            f"{self._file}: left out {len(self.ranges)} bad range(s) of {total} bytes{where}; "
            f"first at byte offset {first.offset}: {first.reason}"
        )

    def _save(self, data: bytes) -> int | None:
        if self._directory is None:
            return None
        if self._saved is None:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            self._saved = (Path(self._directory) / (self._temporary + _BYTES)).open("xb")
        position = self._saved.tell()
        self._saved.write(data)
        return position

    def _publish(self, directory: Path, is_partial: bool) -> None:
        """Replaces what an earlier read of the same part left, also by nothing."""
        lines, saved = directory / (self._stem + _LINES), directory / (self._stem + _BYTES)
        if is_partial and (lines.exists() or self._saved is None):
            return
        if self._saved is None:
            lines.unlink(missing_ok=True)
            saved.unlink(missing_ok=True)
            return
        self._saved.flush()
        os.fsync(self._saved.fileno())
        Path(self._saved.name).replace(saved)
        temporary = directory / (self._temporary + _LINES)
        text = "".join(json.dumps(asdict(bad)) + "\n" for bad in self.ranges)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(lines)


def read_quarantine(directory: str | Path) -> list[QuarantinedRange]:
    """Reads what is in quarantine, by file and offset; a range found by several reads once.

    Args:
        directory: The `quarantinePath` of one or more reads.
    """
    found: dict[tuple[str, int], QuarantinedRange] = {}
    for path in sorted(Path(directory).glob(f"*{_LINES}")):
        for line in path.read_text(encoding="utf-8").splitlines():
            bad = QuarantinedRange(**json.loads(line))
            found[bad.file, bad.offset] = bad
    return [found[key] for key in sorted(found)]
