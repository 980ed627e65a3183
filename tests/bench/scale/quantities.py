"""What is predicted, and the sizes that each is measured at."""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.scale.model import (
    Quantity,
    by_decade,
    by_share,
    table_law,
    vocabulary_bytes,
)

M = 1_000_000

BUILD_CPU = Quantity("build", "cpu_s", "build: CPU time", "s")
LOG_BYTES = Quantity("build", "log_bytes", "build: the log, as text", "MB")
VERSION_BYTES = Quantity("build", "version_bytes", "build: the version on disk", "MB")
SHUFFLE_BYTES = Quantity("build", "shuffle_bytes", "build: shuffled", "MB")
SPILL_BYTES = Quantity("build", "spill_bytes", "build: spilled", "MB")
BUILD_DISK = Quantity("build", "disk_peak_bytes", "build: most on disk at once", "MB")
BUILD_JVM = Quantity("build", "jvm_peak_bytes", "build: memory of the JVM", "MB")
BUILD_WORKER = Quantity("build", "worker_peak_bytes", "build: memory of a Python worker", "MB")
BUILD_DRIVER = Quantity("build", "driver_peak_bytes", "build: memory of the driver's Python", "MB")
TRAIN_CPU = Quantity("train", "cpu_s", "train: CPU time of an epoch", "s")
TRAIN_MEMORY = Quantity("train", "peak_bytes", "train: memory", "MB")
RUN_BYTES = Quantity("train", "run_bytes", "train: the run on disk", "MB")
TABLE_MEMORY = Quantity(
    "table-8-sgd", "memory_bytes", "table of 8, SGD: rows and index", "GB", table_law(8, 0)
)
TABLE_STEP = Quantity(
    "table-8-sgd", "step_cpu_s", "table of 8, SGD: CPU of a step", "ms", by_decade
)
WIDE_MEMORY = Quantity(
    "table-32-adam", "memory_bytes", "table of 32, Adam: rows, state, index", "GB", table_law(32, 2)
)
WIDE_STEP = Quantity(
    "table-32-adam", "step_cpu_s", "table of 32, Adam: CPU of a step", "ms", by_decade
)
SHARED_MEMORY = Quantity(
    "exchange", "memory_bytes", "shared table: memory of a worker", "MB", by_share
)
SHARED_STEP = Quantity(
    "exchange", "step_cpu_s", "shared table: CPU of a step, all workers", "ms"
)  # fmt: skip
RANK_CPU = Quantity("rank", "request_cpu_s", "serve: CPU of a request to score candidates", "ms")
LISTS_CPU = Quantity("lists", "request_cpu_s", "serve: CPU of a list out of all items", "ms")
LISTS_MEMORY = Quantity("lists", "memory_bytes", "serve: memory with so many items", "GB")
VOCABULARY_MEMORY = Quantity(
    "vocabulary", "memory_bytes", "vocabulary: memory of its look-up", "MB", vocabulary_bytes
)
VOCABULARY_CPU = Quantity("vocabulary", "load_cpu_s", "vocabulary: CPU to load it", "ms")

QUANTITIES = (
    BUILD_CPU, LOG_BYTES, VERSION_BYTES, SHUFFLE_BYTES, SPILL_BYTES, BUILD_DISK, BUILD_JVM,
    BUILD_WORKER, BUILD_DRIVER, TRAIN_CPU, TRAIN_MEMORY, RUN_BYTES, TABLE_MEMORY, TABLE_STEP,
    WIDE_MEMORY, WIDE_STEP, SHARED_MEMORY, SHARED_STEP, RANK_CPU, LISTS_CPU, LISTS_MEMORY,
    VOCABULARY_MEMORY, VOCABULARY_CPU,
)  # fmt: skip

UNIT_OF_SIZE: Mapping[str, str] = {
    "build": "events", "train": "events", "table-8-sgd": "keys", "table-32-adam": "keys",
    "exchange": "workers", "rank": "candidates", "lists": "items", "vocabulary": "tokens",
    "traffic-fixed": "workers", "traffic-growing": "workers", "build-history50": "events",
}  # fmt: skip

SIZES: Mapping[str, tuple[int, ...]] = {
    "build": (M, 10 * M, 100 * M),
    "train": (M, 10 * M, 100 * M),
    "table-8-sgd": (M, 10 * M, 100 * M),
    "table-32-adam": (M // 10, M, 10 * M),
    "exchange": (1, 2, 4),
    "rank": (5, 50, 500),
    "lists": (M // 100, M // 10, M),
    "vocabulary": (M // 10, M, 10 * M),
    "traffic-fixed": (2, 4, 8, 64, 512),
    "traffic-growing": (2, 4, 8, 64, 512),
}
"""Sizes that a record of each series is wanted of."""

COMMANDS: Mapping[str, str] = {
    "build": "build", "train": "train", "table-8-sgd": "table --dim 8 --optimizer sgd",
    "table-32-adam": "table --dim 32 --optimizer adam", "exchange": "exchange", "rank": "rank",
    "lists": "lists", "vocabulary": "vocabulary", "traffic-fixed": "traffic",
    "traffic-growing": "traffic --growing",
}  # fmt: skip
"""What follows `measure` to get a record of each series; `--size` is left out."""
