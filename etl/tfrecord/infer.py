"""Finds out which features TFRecord files hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from conf.errors import InputDataError
from etl.tfrecord import decode_kernels as k
from etl.tfrecord.features import KIND_CODES, KeyTable, WireFeature
from etl.tfrecord.framing import Compression, RecordBlock, corrupt_record, read_record_blocks


def infer_features(
    paths: Iterable[str | Path], compression: Compression | Literal["auto"] | None = "auto"
) -> list[WireFeature]:
    """Finds out which features files hold, reading all of them.

    A feature that never holds more than one value is a scalar, any other a list. One that never
    holds a list of any kind is left out.

    Args:
        paths: TFRecord files of `tf.train.Example`.
        compression: As for `read_record_blocks`.

    Returns:
        Features in the order in which they first occur.

    Raises:
        CorruptRecordError: A file is damaged, or a record is not an Example.
        InputDataError: A feature holds different kinds of values in different records.
    """
    found: dict[bytes, tuple[int, int]] = {}
    for path in paths:
        for block in read_record_blocks(path, compression=compression):
            _survey_block(block, found, str(path))
    features: list[WireFeature] = []
    for key, (kinds, length) in found.items():
        name = key.decode("utf-8", errors="replace")
        present = [kind for kind, code in KIND_CODES.items() if kinds >> code & 1]
        if len(present) > 1:
            raise InputDataError(
                f"feature {name!r} holds different kinds of values in different records",
                received=", ".join(present),
                allowed="one kind",
                fix="give the features to read, without this one",
            )
        features.extend(WireFeature(name, kind, length > 1) for kind in present)
    return features


def _survey_block(block: RecordBlock, found: dict[bytes, tuple[int, int]], name: str) -> None:
    """Updates kinds (as bits) and longest list per key."""
    base, first = block.data.ctypes.data, 0
    while True:
        keys = KeyTable(list(found))
        kinds = np.zeros(len(found), np.uint8)
        lengths = np.zeros(len(found), np.int64)
        outcome, record, start, length = k.survey(
            base, block.index, first, keys.fields, keys.table, kinds, lengths
        )
        for key, kind, longest in zip(list(found), kinds, lengths, strict=True):
            found[key] = found[key][0] | int(kind), max(found[key][1], int(longest))
        if outcome == k.OK:
            return
        if outcome == k.MALFORMED:
            offset = block.offset + int(block.index[record, 0])
            raise corrupt_record(
                name, offset, block.first_record + int(record), "not a tf.train.Example"
            )
        found[block.data[start : start + length].tobytes()] = (0, 0)
        first = int(record)
