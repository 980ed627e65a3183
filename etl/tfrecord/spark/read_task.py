"""One task of a read: ranges of files to Arrow batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode import build_decoder
from etl.tfrecord.framing import (
    FOOTER_BYTES,
    HEADER_BYTES,
    BadRange,
    CorruptRecordError,
    RecordBlock,
    read_record_blocks,
)
from etl.tfrecord.infer import FeatureSurvey
from etl.tfrecord.quarantine import DamageLog
from etl.tfrecord.raising.names import find_name
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.row_places import locate_rows
from etl.tfrecord.spark.read_plan import ReadPlan
from etl.tfrecord.splits import FileSplit

_SURVEYED_RECORDS = 1000


class ReadTask:
    """Reads splits one after the other with one decoder."""

    def __init__(self, plan: ReadPlan, options: ReadOptions) -> None:
        """Builds the decoder.

        Args:
            plan: What becomes of the records.
            options: Options of the read.
        """
        self._plan, self._options = plan, options
        self._suspects = set(plan.suspects)
        self._decoder: Any = build_decoder(plan.features, plan.record_type)

    def read(self, split: FileSplit) -> Iterator[pa.RecordBatch]:
        """Reads a file or a range of one.

        Raises:
            CorruptRecordError: The file is damaged; names it and the byte offset.
            InputDataError: A feature does not fit its column.
        """
        place = f"the file from byte {split.start} on" if split.start else "the file"
        for first_record, batch in self._decode(split):
            with locate_rows(batch, first_record, place):
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
                self._check_case(block, batch, name)
                yield block.first_record, batch
            return
        with DamageLog(split.path, split.start, self._options.quarantine) as log:
            for block in read(on_corrupt=log.add):
                batch, malformed = _explain(decoder.decode_sound, block, name)
                for bad in malformed:
                    log.add(_framed_range(block, bad.record, bad.reason))
                if not malformed:
                    self._check_case(block, batch, name)
                yield None if log.ranges else block.first_record, batch

    def _check_case(self, block: RecordBlock, batch: pa.RecordBatch, name: str) -> None:
        """Refuses to take a feature for absent that is there in another case.

        Spark's names do not differ by case, those of features do. Records hold few names, so the
        first ones of a block are enough.

        Raises:
            InputDataError: There is such a feature.
        """
        if not batch.num_rows:
            return
        rows = batch.num_rows
        self._suspects -= {n for n in self._suspects if batch.column(n).null_count < rows}
        if not self._suspects:
            return
        survey = FeatureSurvey(self._plan.record_type)
        few = block.index[:_SURVEYED_RECORDS]
        survey.update(RecordBlock(block.data, few, block.offset, block.first_record), name)
        present = survey.names()
        for wanted in sorted(self._suspects - set(present)):
            found = find_name(wanted, present)
            if found:
                raise InputDataError(
                    f"{name}: no record has a feature {wanted!r}, but the case of letters matters",
                    received=f"column {wanted}",
                    allowed=", ".join(found),
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
