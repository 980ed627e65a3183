"""Reads records: a task's ranges of files to Arrow batches.

Damaged bytes are set aside: the quarantine holds a line of JSON per range, and the bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.storage.atomic_output import atomic_file, write_text_atomic
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import (
    FOOTER_BYTES,
    HEADER_BYTES,
    BadRange,
    CorruptRecordError,
    RecordBlock,
    read_record_blocks,
)
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.spark.input_files import FileSplit
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.types.features import WireFeature
from etl.tfrecord.types.from_example import find_name
from etl.tfrecord.types.refusals import locate_rows, restate

if TYPE_CHECKING:
    from etl.tfrecord.spark.schema import ReadPlan

_LOGGER = logging.getLogger(__name__)
_LINES, _BYTES = ".jsonl", ".bin"
_SPOOLED_BYTES = 16 << 20


@dataclass(frozen=True)
class QuarantinedRange:
    """A range of a file, uncompressed, that is no sound record.

    `record` is the number of records before it in what was read, None where earlier damage hides
    it; its bytes lie in file `saved_in` beside, from `saved_at` on.
    """

    file: str
    offset: int
    length: int
    record: int | None
    reason: str
    saved_in: str | None = None
    saved_at: int | None = None


class DamageLog(AbstractContextManager["DamageLog"]):
    """Collects the bad ranges of a file from a start on; pieces of a range become one.

    Their bytes are set aside in the directory; without one they are counted only.
    """

    def __init__(self, file: str, start: int, directory: str | None) -> None:
        key = hashlib.sha256(f"{file}\0{start}".encode()).hexdigest()[:16]
        self._file, self._stem = file, f"{Path(file).name}.{key}"
        self._directory = None if directory is None else Path(directory)
        self._saved = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES)  # noqa: SIM115
        self.ranges: list[QuarantinedRange] = []

    def add(self, bad: BadRange) -> None:
        """Takes a bad range, or a further piece of the last one."""
        place: tuple[str, int] | tuple[None, None] = (None, None)
        if self._directory is not None:
            place = self._stem + _BYTES, self._saved.tell()
            self._saved.write(bad.data.tobytes())
        if bad.continues:
            last = self.ranges[-1]
            self.ranges[-1] = replace(last, length=last.length + bad.data.size)
            return
        found = bad.offset, bad.data.size, bad.record, bad.reason
        self.ranges.append(QuarantinedRange(self._file, *found, *place))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publishes and warns, unless an attempt failed; names do not depend on the attempt.

        A reader that its consumer leaves early does not replace what was found before.
        """
        is_left_early = kind is not None and issubclass(kind, GeneratorExit)
        with self._saved:
            if kind is None or is_left_early:
                self._warn()
                if self._directory is not None:
                    self._publish(self._directory, is_left_early)

    def _warn(self) -> None:
        if self.ranges:
            _LOGGER.warning(
                "%s: left out %d bad range(s) of %d bytes%s; first at byte offset %d: %s",
                self._file, len(self.ranges), sum(bad.length for bad in self.ranges),
                f", set aside in {self._directory}" if self._directory else "",
                self.ranges[0].offset, self.ranges[0].reason,
            )  # fmt: skip

    def _publish(self, directory: Path, is_partial: bool) -> None:
        """Replaces what an earlier read of the same part left, also by nothing."""
        lines, saved = (directory / (self._stem + end) for end in (_LINES, _BYTES))
        if is_partial and (lines.exists() or not self.ranges):
            return
        if not self.ranges:
            lines.unlink(missing_ok=True)
            saved.unlink(missing_ok=True)
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._saved.seek(0)
        with atomic_file(saved) as unfinished, unfinished.open("xb") as output:
            shutil.copyfileobj(self._saved, output)
        write_text_atomic(lines, "".join(json.dumps(asdict(bad)) + "\n" for bad in self.ranges))


_LOOKED_AT_RECORDS = 1000


class ReadTask:
    """Reads splits one after the other with one decoder."""

    def __init__(self, plan: ReadPlan, options: ReadOptions) -> None:
        self._plan, self._options = plan, options
        self._suspects = set(plan.suspects)
        self._decoder: Any = build_decoder(plan.from_example.features, plan.record_type)

    def read(self, split: FileSplit) -> Iterator[pa.RecordBatch]:
        origin = f"the file from byte {split.start} on" if split.start else "the file"
        for first_record, batch in self._decode(split):
            with locate_rows(batch, first_record, origin):
                completed = self._plan.complete(batch, split.partition, split.path)
            yield completed

    def _decode(self, split: FileSplit) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Decoded blocks and, where none of their records was left out, the first one's number."""
        name = f"{split.path} (from byte {split.start} on)" if split.start else split.path
        is_range = split.start > 0 or split.stop is not None
        is_lenient = self._options.on_corrupt != "fail"
        with DamageLog(split.path, split.start, self._options.quarantine) as log:
            for block in read_record_blocks(
                split.path,
                compression=None if is_range else self._options.compression,
                start=split.start,
                stop=split.stop,
                on_corrupt=log.add if is_lenient else None,
                opener=self._options.opener,
            ):
                batch, malformed = _explain(self._decode_block, block, name)
                for bad in malformed:
                    log.add(_framed_range(block, bad.record, bad.reason))
                if not malformed:
                    self._check_absent(block, batch, name)
                yield None if log.ranges else block.first_record, batch

    def _decode_block(self, block: RecordBlock, name: str) -> Any:
        if self._options.on_corrupt == "fail":
            return self._decoder.decode_block(block, name), ()
        return self._decoder.decode_sound(block, name)

    def _check_absent(self, block: RecordBlock, batch: pa.RecordBatch, name: str) -> None:
        """Refuses to take a feature for absent that is there in another case, or in other messages.

        Spark's names do not differ by case, those of features do. Records hold few names, so the
        first ones of a block are enough.
        """
        rows = batch.num_rows
        self._suspects -= {n for n in self._suspects if batch.column(n).null_count < rows}
        if not rows or not self._suspects:
            return
        collector = FeatureCollector(self._plan.record_type)
        collector.update(block.cut(slice(_LOOKED_AT_RECORDS)), name)
        wanted = self._plan.from_example.features
        collector.refuse_other_messages(feature.name for feature in wanted)
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
        fix = f"{error.fix or 'change the schema'}; if it was inferred from a sample of the records"
        raise restate(error, fix=f"{fix}: option inferRecords=all, or give a schema") from error


def _framed_range(block: RecordBlock, record: int, reason: str) -> BadRange:
    start, length = block.index[record].tolist()
    start, stop = start - HEADER_BYTES, start + length + FOOTER_BYTES
    number = block.first_record + record
    return BadRange(block.offset + start, block.data[start:stop], number, reason)


_SAMPLE_FILES = 16
_SAMPLE_BLOCK_BYTES = 1 << 20


def infer_sample(
    files: Sequence[DataFile], options: ReadOptions, record_type: str
) -> list[WireFeature]:
    """Infers features from the first records of some files, or from all; in order of occurrence."""
    chosen = [file for file in files if file.bytes]
    quota: int | None = None
    if options.infer_records is not None and chosen:
        step = np.linspace(0, len(chosen) - 1, min(_SAMPLE_FILES, len(chosen))).round()
        chosen = [chosen[int(k)] for k in step]
        quota = -(-options.infer_records // len(chosen))
    return infer_features(
        [file.path for file in chosen], record_type, quota, options.on_corrupt != "fail",
        compression=options.compression, block_bytes=_SAMPLE_BLOCK_BYTES, opener=options.opener,
    )  # fmt: skip
