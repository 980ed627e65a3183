"""Features inferred from a sample of the records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.types.features import WireFeature

_SAMPLE_FILES = 16
_SAMPLE_BLOCK_BYTES = 1 << 20


def infer_sample(
    files: Sequence[DataFile], options: ReadOptions, record_type: str
) -> list[WireFeature]:
    """Infers features from the first records of some files, or from all records.

    Args:
        files: Files of the read.
        options: How many records to look at, and what to do at damage.
        record_type: `Example` or `SequenceExample`.

    Returns:
        Features in the order in which they first occur.

    Raises:
        CorruptRecordError: A file is damaged and the read is to fail there.
        InputDataError: A feature holds different kinds of values in different records.
    """
    collector = FeatureCollector(record_type)
    chosen = [file for file in files if file.bytes]
    quota: int | None = None
    if options.infer_records is not None and chosen:
        step = np.linspace(0, len(chosen) - 1, min(_SAMPLE_FILES, len(chosen))).round()
        chosen = [chosen[int(k)] for k in step]
        quota = -(-options.infer_records // len(chosen))
    for file in chosen:
        _collect_file(collector, file, options, quota)
    return collector.features()


def _collect_file(
    collector: FeatureCollector, file: DataFile, options: ReadOptions, quota: int | None
) -> None:
    is_lenient = options.on_corrupt != "fail"
    left = quota
    for block in read_record_blocks(
        file.path,
        compression=options.compression,
        block_bytes=_SAMPLE_BLOCK_BYTES,
        on_corrupt=_pass_over if is_lenient else None,  # what is read later tells of it
        opener=options.opener,
    ):
        sample = RecordBlock(block.data, block.index[:left], block.offset, block.first_record)
        try:
            collector.update(sample, file.path)
        except CorruptRecordError:
            if not is_lenient:
                raise
            _collect_one_by_one(collector, sample, file.path)
        if left is not None:
            left -= len(sample.index)
            if left <= 0:
                return


def _pass_over(bad: object) -> None:
    pass


def _collect_one_by_one(collector: FeatureCollector, block: RecordBlock, name: str) -> None:
    for row in range(len(block.index)):
        one = RecordBlock(block.data, block.index[row : row + 1], block.offset, block.first_record)
        try:
            collector.update(one, name)
        except CorruptRecordError:
            continue
