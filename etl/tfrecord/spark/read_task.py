"""Reads records: a task's ranges of files to Arrow batches.

Damaged bytes are set aside: the quarantine holds a line of JSON per range, and the bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa

from conf.errors import InputDataError
from conf.storage.atomic_output import AtomicFile, write_text_atomic
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import (
    FOOTER_BYTES,
    HEADER_BYTES,
    BadRange,
    CorruptRecordError,
    RecordBlock,
    read_record_blocks,
)
from etl.tfrecord.codec.infer import FeatureCollector
from etl.tfrecord.spark.input_files import FileSplit
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.spark.read_plan import ReadPlan
from etl.tfrecord.types.from_example import find_name
from etl.tfrecord.types.row_errors import locate_rows

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
    """Collects the bad ranges of a file from a start on; pieces of a range become one.

    Their bytes are set aside in the directory; without one they are counted only.
    """

    def __init__(self, file: str, start: int, directory: str | None) -> None:
        self._file, self._directory = file, directory
        key = hashlib.sha256(f"{file}\0{start}".encode()).hexdigest()[:16]
        self._stem = f"{Path(file).name}.{key}"
        self._output: AtomicFile | None = None
        self._saved: BinaryIO | None = None
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
            if self._saved is not None and self._output is not None:
                self._saved.close()
                self._output.discard()

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
            self._output = AtomicFile(Path(self._directory) / (self._stem + _BYTES))
            self._saved = self._output.unfinished.open("xb")
        position = self._saved.tell()
        self._saved.write(data)
        return position

    def _publish(self, directory: Path, is_partial: bool) -> None:
        """Replaces what an earlier read of the same part left, also by nothing."""
        lines, saved = directory / (self._stem + _LINES), directory / (self._stem + _BYTES)
        if is_partial and (lines.exists() or self._saved is None):
            return
        if self._saved is None or self._output is None:
            lines.unlink(missing_ok=True)
            saved.unlink(missing_ok=True)
            return
        self._saved.flush()
        self._output.publish()
        write_text_atomic(lines, "".join(json.dumps(asdict(bad)) + "\n" for bad in self.ranges))


_LOOKED_AT_RECORDS = 1000


class ReadTask:
    """Reads splits one after the other with one decoder."""

    def __init__(self, plan: ReadPlan, options: ReadOptions) -> None:
        self._plan, self._options = plan, options
        self._suspects = set(plan.suspects)
        self._decoder: Any = build_decoder(plan.features, plan.record_type)

    def read(self, split: FileSplit) -> Iterator[pa.RecordBatch]:
        """Reads a file or a range of one."""
        try:
            yield from self._read(split)
        except FileNotFoundError as error:
            raise InputDataError(
                "a file is gone since it was listed",
                received=split.path,
                fix="load its folder again; create a view of it anew",
            ) from error

    def _read(self, split: FileSplit) -> Iterator[pa.RecordBatch]:
        origin = f"the file from byte {split.start} on" if split.start else "the file"
        for first_record, batch in self._decode(split):
            with locate_rows(batch, first_record, origin):
                completed = self._plan.complete(batch, split.partition, split.path)
            yield completed

    def _decode(self, split: FileSplit) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Decoded blocks and, where none of their records was left out, the first one's number."""
        decoder = self._decoder
        name = f"{split.path} (from byte {split.start} on)" if split.start else split.path
        is_range = split.start > 0 or split.stop is not None
        read = functools.partial(
            read_record_blocks,
            split.path,
            compression=None if is_range else self._options.compression,
            start=split.start,
            stop=split.stop,
            opener=self._options.opener,
        )
        if self._options.on_corrupt == "fail":
            for block in read():
                batch = _explain(decoder.decode_block, block, name)
                self._check_absent(block, batch, name)
                yield block.first_record, batch
            return
        with DamageLog(split.path, split.start, self._options.quarantine) as log:
            for block in read(on_corrupt=log.add):
                batch, malformed = _explain(decoder.decode_sound, block, name)
                for bad in malformed:
                    log.add(_framed_range(block, bad.record, bad.reason))
                if not malformed:
                    self._check_absent(block, batch, name)
                yield None if log.ranges else block.first_record, batch

    def _check_absent(self, block: RecordBlock, batch: pa.RecordBatch, name: str) -> None:
        """Refuses to take a feature for absent that is there in another case, or in other messages.

        Spark's names do not differ by case, those of features do. Records hold few names, so the
        first ones of a block are enough.
        """
        if not batch.num_rows:
            return
        rows = batch.num_rows
        self._suspects -= {n for n in self._suspects if batch.column(n).null_count < rows}
        if not self._suspects:
            return
        collector = FeatureCollector(self._plan.record_type)
        collector.update(block.cut(slice(_LOOKED_AT_RECORDS)), name)
        collector.refuse_other_messages(feature.name for feature in self._plan.features)
        present = collector.names()
        for column in sorted(self._suspects - set(present)):
            spellings = find_name(column, present)
            if spellings:
                raise InputDataError(
                    f"{name}: no record has a feature {column!r}, but the case of letters matters",
                    received=f"column {column}",
                    allowed=", ".join(spellings),
                    fix="give a schema with the names as they are in the file",
                )


def _explain(decode: Callable[..., Any], block: RecordBlock, name: str) -> Any:
    """Decodes; an error over what a feature holds says what to do if the schema was inferred."""
    try:
        return decode(block, name)
    except CorruptRecordError:
        raise
    except InputDataError as error:
        fix = f"{error.fix or 'change the schema'}; if it was inferred, from a sample of the "
        raise InputDataError(
            error.what,
            received=error.received,
            allowed=error.allowed,
            fix=f"{fix}records: option inferRecords=all, or give a schema",
        ) from error


def _framed_range(block: RecordBlock, record: int, reason: str) -> BadRange:
    """A record with its framing."""
    start, length = block.index[record].tolist()
    start, stop = start - HEADER_BYTES, start + length + FOOTER_BYTES
    number = block.first_record + record
    return BadRange(block.offset + start, block.data[start:stop], number, reason)
