"""Tables of growing size, tables that workers share, and vocabularies: memory, bytes, CPU time."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa

from conf.encoders import VocabularySpec
from conf.schema import FIRST_TOKEN_ID
from etl.encoders.token_lookup import TokenEncoder
from etl.encoders.vocabulary import vocabulary_schema
from tests.bench.clock import read_own_memory, release_free_memory, run_driver_process
from tests.bench.scale.model import index_bytes, row_bytes, vocabulary_bytes

if TYPE_CHECKING:
    from tests.bench.scale.exchange import Traffic
    from tests.bench.shared_rows import Outcome

STATE = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Numbers that an optimizer keeps for each of a row."""
BATCH, LENGTH, STEPS = 2048, 50, 20
SHARED_KEYS, SHARED_DIM = 1_000_000, 32
LOOKUPS = 1_000_000
LIBRARIES_BYTES = 1_500_000_000
"""Of TensorFlow, the batches and what building takes for a moment, beside the table."""
SIMULATED_KEYS, SIMULATED_BATCHES = 10_000_000, 2
GLOBAL_BATCH, BATCH_OF_WORKER = 65_536, 256


def measure_table(keys: int, dim: int, sparse: str) -> dict[str, float]:
    """Builds a dynamic table and times steps on it, in a process of its own.

    Args:
        keys: That the table knows.
        dim: Numbers of a row.
        sparse: Kind of its optimizer.

    Raises:
        MemoryError: Less memory is free than it takes.
    """
    # Keys, their rows and the draws of a batch pass through memory while it is built.
    needed = 1.1 * (keys * (row_bytes(dim, STATE[sparse]) + 24) + index_bytes(keys))
    _check_memory(needed + LIBRARIES_BYTES, f"a table of {keys:,} keys of {dim} with {sparse}")
    (found,) = _measure(workers=1, keys=keys, dim=dim, sparse=sparse)
    return {
        "memory_bytes": found.table_bytes, "matrix_bytes": found.matrix_bytes,
        "peak_bytes": found.peak_bytes, "step_cpu_s": found.cpu_s, "step_wall_s": found.wall_s,
        "batch": BATCH,
    }  # fmt: skip


def measure_exchange(workers: int) -> dict[str, float]:
    """Times steps of workers that share a table, and counts what they send.

    Args:
        workers: Processes of this machine; 1: the same table in one process.
    """
    found = _measure(workers=workers, keys=SHARED_KEYS, dim=SHARED_DIM, sparse="adam")
    first = found[0]
    return {
        "memory_bytes": statistics.fmean(each.table_bytes for each in found),
        "step_cpu_s": sum(each.cpu_s for each in found),
        "step_wall_s": max(each.wall_s for each in found),
        "distinct": first.distinct, "sent_rows": first.sent, "batches": first.batches,
        "loopback_bytes": first.loopback_bytes, "batch": BATCH,
    }  # fmt: skip


def _measure(*, workers: int, keys: int, dim: int, sparse: str) -> list[Outcome]:
    from tests.bench.shared_rows import Setting, measure

    return measure(Setting(workers, workers > 1, keys, dim, BATCH, LENGTH, STEPS, sparse))


def count_traffic(workers: int, batch: int, keys: int, dim: int, batches: int) -> Traffic:
    """Counts what a worker sends in a step, without a network.

    Args:
        workers: How many share the table.
        batch: Rows of the global batch.
        keys: Rows of the table.
        dim: Numbers of a row.
        batches: How many are planned.
    """
    from tests.bench.scale.exchange import draw_batches, simulate

    return simulate(draw_batches(batch, LENGTH, keys, batches), workers, dim)


def measure_traffic(workers: int, *, is_growing: bool) -> dict[str, float]:
    """Returns the counts of `count_traffic` as figures.

    Args:
        workers: How many share the table.
        is_growing: Whether each worker adds its rows to the batch, else all share one batch.
    """
    batch = BATCH_OF_WORKER * workers if is_growing else GLOBAL_BATCH
    counted = count_traffic(workers, batch, SIMULATED_KEYS, SHARED_DIM, SIMULATED_BATCHES)
    return {name: value for name, value in asdict(counted).items() if name != "workers"}


def measure_vocabulary(tokens: int) -> dict[str, float]:
    """Loads a vocabulary of whole numbers as a worker of a build does, in a process of its own.

    Raises:
        MemoryError: Less memory is free than it takes.
        RuntimeError: The process failed.
    """
    _check_memory(2 * vocabulary_bytes(tokens) + 24 * tokens, f"a vocabulary of {tokens:,} tokens")
    done = run_driver_process("tests.bench.scale.tables", {"tokens": tokens})
    if done.returncode:
        raise RuntimeError(done.errors[-3000:])
    return done.value


def _check_memory(needed: float, what: str) -> None:
    if needed > (free := psutil.virtual_memory().available):
        raise MemoryError(f"{what} takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def load_vocabulary(tokens: int) -> dict[str, float]:
    """Builds the look-up of a vocabulary and looks a million tokens up; memory of this process."""
    spec = VocabularySpec("item", "int64", "", FIRST_TOKEN_ID + tokens, "")
    few = pa.array([1, 2])
    TokenEncoder.of(spec, pa.table({"token": few})).encode(few)  # compiles
    release_free_memory()
    before = read_own_memory()
    table = _build_vocabulary(tokens)
    start = time.process_time()
    encoder = TokenEncoder.of(spec, table)
    load_cpu_s = time.process_time() - start
    chosen = np.random.default_rng(3).integers(0, tokens, LOOKUPS)
    asked = table["token"].combine_chunks().take(pa.array(chosen))
    del table
    pa.default_memory_pool().release_unused()
    release_free_memory()
    taken = read_own_memory() - before
    start = time.process_time()
    encoder.encode(asked)
    return {
        "memory_bytes": taken, "load_cpu_s": load_cpu_s,
        "lookup_cpu_s_per_million": (time.process_time() - start) / LOOKUPS * 1e6,
    }  # fmt: skip


def _build_vocabulary(tokens: int) -> pa.Table:
    """Returns a vocabulary whose tokens lie all over the numbers of 64 bits, as hashes do."""
    spread = np.arange(1, tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ids = np.arange(FIRST_TOKEN_ID, FIRST_TOKEN_ID + tokens)
    columns = [pa.array(spread.view(np.int64)), pa.array(ids), pa.array(ids[::-1])]
    return pa.table(columns, schema=vocabulary_schema("int64"))


if __name__ == "__main__":
    print(json.dumps(load_vocabulary(**json.loads(sys.argv[1]))))
