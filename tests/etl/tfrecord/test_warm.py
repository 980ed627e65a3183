"""After warming, nothing is left to compile on the write and the read path."""

import subprocess
import sys
from pathlib import Path

import etl

PROGRAM = """
import gc
import numpy as np, pyarrow as pa
from numba.core.dispatcher import Dispatcher
from etl.tfrecord.jit_cache import KernelCache
from etl.tfrecord.warm import warm_kernels

warm_kernels()
entries = [d for d in gc.get_objects() if isinstance(d, Dispatcher)
           and d.py_func.__module__.startswith("etl.")
           and isinstance(d._cache, KernelCache)]  # the others are called by kernels alone
assert len(entries) > 10
before = {d: len(d.signatures) for d in entries}
assert all(before.values()), [d.py_func.__name__ for d, n in before.items() if not n]

from etl.tfrecord.decode import FeatureSurvey, build_decoder
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.framing import RecordBlock, index_records
from etl.tfrecord.crc32c import crc32c
batch = pa.record_batch({
    "i": pa.array([1, None, 3], pa.int32()), "f": [0.5, 1.5, None], "s": ["a", None, "b" * 500],
    "l": [[1, 2], None, []], "q": pa.array([[[1.5]], None, []]), "t": [["x"], [], None],
})
for record_type, columns in (("Example", ["i", "f", "s", "l", "t"]), ("ByteArray", ["s"]),
                             ("SequenceExample", batch.schema.names)):
    part = batch.select(columns)
    if record_type == "ByteArray":
        part = part.slice(0, 1)
    encoder = build_encoder(part.schema, record_type)
    data = np.concatenate(list(encoder.encode_chunks(part, 2)))
    crc32c(data, 7)
    block = RecordBlock(data, index_records(data), 0, 0)
    survey = FeatureSurvey(record_type)
    survey.update(block)
    decoder = build_decoder(survey.features(), record_type)
    decoder.decode_block(block)
    decoder.decode_sound(RecordBlock(data, np.array([[0, 3]]), 0, 0))
after = {d.py_func.__name__: (before[d], len(d.signatures)) for d in entries
         if len(d.signatures) != before[d]}
assert not after, after
"""


def test_nothing_is_left_to_compile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True,
        cwd=Path(etl.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
