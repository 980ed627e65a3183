"""What can be wrong with a TFRecord file's bytes, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conf.errors import InputDataError
from etl.tfrecord import framing_kernels as k

REASONS = {
    k.CUT_HEADER: "truncated header (fewer than 12 bytes are left)",
    k.BAD_LENGTH: "checksum of the length does not match",
    k.CUT_PAYLOAD: "truncated payload (the record reaches past the end)",
    k.BAD_PAYLOAD: "checksum of the payload does not match",
    k.TOO_LONG: f"record longer than {k.MAX_RECORD_BYTES} bytes",
}
FIX_CORRUPT = "write or copy the file again; compare its size and CRC-32C with the manifest's"


class CorruptRecordError(InputDataError):
    """A TFRecord file whose bytes cannot be trusted: truncated, altered, or no TFRecord at all."""


@dataclass(frozen=True)
class BadRange:
    """Bytes of a file that are no sound record.

    Attributes:
        offset: Position in the (uncompressed) file.
        data: The bytes, uint8 `[bytes]`; a long range arrives piece by piece.
        record: Number of records before it, or None where earlier damage hides how many they are.
        reason: What is wrong.
        continues: Whether it is a further piece of the range told before.
    """

    offset: int
    data: np.ndarray
    record: int | None
    reason: str
    continues: bool = False


def corrupt_record(
    name: str, offset: int, record: int, reason: str, compressed: bool = False
) -> CorruptRecordError:
    """Builds the error for a bad record.

    Args:
        name: File, or another name of the buffer.
        offset: Byte offset of the record, in the uncompressed stream.
        record: Number of records before it.
        reason: What is wrong.
        compressed: Whether the file is compressed.
    """
    place = f"byte offset {offset}{' of the uncompressed stream' if compressed else ''}"
    return CorruptRecordError(
        f"{name}: {reason}, at {place} (record {record})",
        allowed="an intact TFRecord file",
        fix=FIX_CORRUPT,
    )


@dataclass(frozen=True)
class DamageReport:
    """Where damage goes: to a reader's hook, or into an exception.

    Attributes:
        name: File.
        is_compressed: Whether offsets are those of the inflated stream.
        on_corrupt: The hook; None to raise.
        is_stream_intact: Whether bytes past damage are what was written. Where a compressed
            stream is damaged they may repeat what was before, checksums and all.
    """

    name: str
    is_compressed: bool
    on_corrupt: Callable[[BadRange], None] | None
    is_stream_intact: Callable[[], bool]

    def tell(self, bad: BadRange, record: int) -> None:
        """Reports a bad range that begins at record number `record`.

        Raises:
            CorruptRecordError: There is no hook.
        """
        if self.on_corrupt is None:
            raise corrupt_record(self.name, bad.offset, record, bad.reason, self.is_compressed)
        self.on_corrupt(bad)
