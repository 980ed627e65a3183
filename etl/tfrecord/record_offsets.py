"""Where records begin in framed bytes that were written a moment ago."""

from __future__ import annotations

import numpy as np

from etl.tfrecord.framing import FOOTER_BYTES, HEADER_BYTES
from etl.tfrecord.kernels import kernel, load_i64

_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES


@kernel
def _walk(address: int, size: int, starts: np.ndarray) -> int:
    position, n = 0, 0
    while position < size:
        starts[n] = position
        n += 1
        position += load_i64(address + position) + _FRAME_BYTES
    starts[n] = position
    return n


def find_record_starts(framed: np.ndarray) -> np.ndarray:
    """Finds the records of a buffer by their lengths, without verifying anything.

    Args:
        framed: Whole sound records, contiguous uint8 `[bytes]`.

    Returns:
        Offset of each record and, last, of the end; int64 `[records + 1]`.
    """
    # Room for the most records that could fit; pages that are not needed are never touched.
    starts = np.empty(framed.size // _FRAME_BYTES + 1, np.int64)
    records = _walk(framed.ctypes.data, framed.size, starts)
    return starts[: records + 1]
