"""Feeds mutated records to the compiled decoder, each ending where memory ends.

Run in a process of its own by `test_decoder_fuzz.py`: input and outputs lie right before pages
that may not be touched, so that a single byte read or written too far kills the process.

    python decoder_fuzz.py RECORD_TYPE RECORDS SEED CORPUS.npz RESULT.npz
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from etl.tfrecord.codec import decode_kernels as k
from etl.tfrecord.codec.decode import FeatureTable
from etl.tfrecord.codec.decode_kernels import BYTES, FLOAT
from etl.tfrecord.codec.kernels import kernel, store_u8
from etl.tfrecord.types.features import WireFeature

FEATURES = {
    "Example": (
        WireFeature("i", "int64"), WireFeature("f", "float32"), WireFeature("b", "bytes"),
        WireFeature("il", "int64", True), WireFeature("fl", "float32", True),
        WireFeature("bl", "bytes", True),
    ),
    "SequenceExample": (
        WireFeature("i", "int64"), WireFeature("bl", "bytes", True),
        WireFeature("is", "int64", is_sequence=True),
        WireFeature("fs", "float32", is_sequence=True),
        WireFeature("bs", "bytes", is_sequence=True),
    ),
}  # fmt: skip
REGION_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 3000, 2048


def guarded_end(size: int = REGION_BYTES) -> int:
    """Address past a readable and writable region that is followed by a forbidden page."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, size + page, mmap.PROT_READ | mmap.PROT_WRITE,
                      mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # fmt: skip
    if libc.mprotect(start + size, page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return start + size


@kernel
def draw(state, below):
    """The next random number of an xorshift generator, in [0, below)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64((x >> np.uint64(11)) % np.uint64(max(1, below)))


@kernel
def mutate(corpus, starts, state, record):
    """Copies a record of the corpus and damages it; returns its length."""
    n = draw(state, len(starts) - 1)
    length = min(starts[n + 1] - starts[n], len(record))
    record[:length] = corpus[starts[n] : starts[n] + length]
    for _ in range(draw(state, 4)):
        what, at = draw(state, 8), draw(state, length)
        if length == 0:
            break
        if what == 0:
            record[at] ^= np.uint8(1 << draw(state, 8))
        elif what == 1:
            record[at] = np.uint8(draw(state, 256))
        elif what == 2:
            length = at
        elif what == 3:  # a length, most likely: a small byte a little more or less
            record[at] = np.uint8(np.int64(record[at]) + draw(state, 9) - 4)
        elif what == 4:  # another record's bytes
            other = draw(state, len(corpus))
            size = min(draw(state, 24), len(corpus) - other, length - at)
            record[at : at + size] = corpus[other : other + size]
        elif what == 5:  # a piece twice, what follows moved
            size = min(draw(state, 24), length - at, len(record) - length)
            for i in range(length - 1, at - 1, -1):
                record[i + size] = record[i]
            length += size
        elif what == 6:  # a piece left out
            size = min(draw(state, 24), length - at)
            record[at : length - size] = record[at + size : length].copy()
            length -= size
        else:  # a varint that goes on
            size = min(draw(state, 12), length - at)
            record[at : at + size] = np.uint8(0xFF if draw(state, 2) else 0x80)
    return length


@kernel
def give_room(features, ends):
    """Lays the outputs of every feature right before their forbidden pages, as long as counted."""
    for f in range(len(features)):
        feature = features[f]
        width = 1 if feature.kind == BYTES else 4 if feature.kind == FLOAT else 8
        count = feature.count if feature.depth > 0 else 1
        size, lists = feature.size, feature.lists
        feature.count_room, feature.size_room, feature.list_room = count, size, lists
        feature.count, feature.size, feature.lists, feature.row = 0, 0, 0, -1
        feature.values = ends[0] - width * (size if feature.kind == BYTES else count)
        feature.list_offsets = ends[2] - 4 * (lists + 1)
        if feature.depth > 0 or feature.kind == BYTES:
            feature.row_offsets = ends[3] - 4 * 2
            feature.byte_offsets = ends[1] - 4 * (count + 1) if feature.depth > 0 else ends[3] - 8
        store_u8(feature.valid, np.uint8(0))


@kernel
def lay_out(state, corpus, starts, record, end, features, fresh, ends):
    """Puts a mutated record where memory ends, and outputs with the room that is known of."""
    length = mutate(corpus, starts, state, record)
    for i in range(length):
        store_u8(end - length + i, record[i])
    features[:] = fresh
    give_room(features, ends)
    return length


def run(records, state, corpus, starts, end, ends, features, samples, sample_lengths, counts):
    """Decodes mutated records one by one; counts outcomes and keeps some accepted ones.

    Outputs share their memory, each being laid out anew once the decoder has counted what it needs.
    The decoder is called as readers call it: a compiled loop around it would have to be compiled
    together with it, which takes longer than all the calls.
    """
    record, index = np.empty(4096, np.uint8), np.zeros((1, 2), np.int64)
    table, _valid = features.lay_out(1)
    fresh = table.copy()  # without room
    no_rows, sampled = np.empty(0, np.int64), 0
    for _ in range(records):
        length = lay_out(state, corpus, starts, record, end, table, fresh, ends)
        index[0, 1] = length
        call = end - length, index, end, table, no_rows
        features.run_kernel(*call)
        give_room(table, ends)
        outcome, _, _ = features.run_kernel(*call)
        counts[outcome] += 1
        chosen = draw(state, max(1, records // (2 * len(samples)))) == 0
        if chosen and outcome == k.OK and sampled < len(samples) and length <= samples.shape[1]:
            samples[sampled, :length] = record[:length]
            sample_lengths[sampled] = length
            sampled += 1
    return sampled


def main(record_type: str, records: int, seed: int, corpus_file: str, result_file: str) -> None:
    """Runs and writes counts by outcome, and accepted records to be checked by protobuf."""
    loaded = np.load(corpus_file)
    corpus, starts = loaded["corpus"], loaded["starts"]
    state = np.array([seed * 2654435761 + 88172645463325252], np.uint64)
    end = guarded_end()
    ends = np.array([guarded_end() for _ in range(4)], np.int64)
    samples = np.zeros((SAMPLES, SAMPLE_BYTES), np.uint8)
    sample_lengths, counts = np.zeros(SAMPLES, np.int64), np.zeros(8, np.int64)
    features = FeatureTable(FEATURES[record_type])
    sampled = run(
        records, state, corpus, starts, end, ends, features, samples, sample_lengths, counts
    )
    np.savez(result_file, samples=samples[:sampled], lengths=sample_lengths[:sampled],
             counts=counts)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
