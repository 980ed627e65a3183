"""A sample of records to infer features from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from etl.tfrecord.codec.framing import CorruptRecordError, read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.types.features import WireFeature

_SAMPLE_FILES = 16
_SAMPLE_BLOCK_BYTES = 1 << 20


def infer_sample(
    files: Sequence[DataFile], options: ReadOptions, record_type: str
) -> list[WireFeature]:
    """Infers features from the first records of some files, or from all; in order of occurrence."""
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
    collector: FeatureCollector, file: DataFile, options: ReadOptions, left: int | None
) -> None:
    is_lenient = options.on_corrupt != "fail"
    for block in read_record_blocks(
        file.path,
        compression=options.compression,
        block_bytes=_SAMPLE_BLOCK_BYTES,
        on_corrupt=(lambda _: None) if is_lenient else None,  # what is read later tells of it
        opener=options.opener,
    ):
        sample = block.cut(slice(left))
        try:
            collector.update(sample, file.path)
        except CorruptRecordError:
            if not is_lenient:
                raise
            for row in range(len(sample.index)):
                with contextlib.suppress(CorruptRecordError):
                    collector.update(sample.cut(slice(row, row + 1)), file.path)
        if left is not None:
            left -= len(sample.index)
            if left <= 0:
                return
