"""The kinds of records that a TFRecord file may hold."""

from __future__ import annotations

from typing import Literal

RecordType = Literal["Example", "SequenceExample", "ByteArray"]
RECORD_TYPES: tuple[RecordType, ...] = ("Example", "SequenceExample", "ByteArray")
