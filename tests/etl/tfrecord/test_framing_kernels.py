"""Record starts found by walking headers."""

import numpy as np
import pytest

from etl.tfrecord.framing_kernels import walk_headers


@pytest.mark.parametrize("every", [1, 40, 100, 10_000])
def test_walk_finds_the_first_record_past_each_multiple(frame, every: int) -> None:
    payloads = [bytes(k % 29) for k in range(60)]
    data = np.frombuffer(frame(payloads), np.uint8)
    starts = np.cumsum([len(p) + 16 for p in payloads])[:-1].tolist()
    expected, wanted = [], every
    for start in starts:
        if start >= wanted:
            expected.append(start)
            wanted = (start // every + 1) * every
    offsets = np.empty(len(data), np.int64)
    assert offsets[: walk_headers(data.ctypes.data, data.size, every, offsets)].tolist() == expected


def test_walk_stops_at_an_unsound_header(frame) -> None:
    data = np.frombuffer(frame([b"abcd"] * 10), np.uint8).copy()
    data[5 * 20] ^= 1
    offsets = np.empty(20, np.int64)
    n = walk_headers(data.ctypes.data, data.size, 20, offsets)
    assert offsets[:n].tolist() == [20, 40, 60, 80]
    data[:] = 0
    assert walk_headers(data.ctypes.data, data.size, 20, offsets) == 0
