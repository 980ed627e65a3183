"""Processes of a run: what they agree on, their memory, and failures of their runtime as ours.

With several processes each agreement is a collective: all make the same calls in one order.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from conf import errors
from conf.errors import ConfigError, InternalError, SluiceError
from training.distribution.strategy import count_workers, has_gpu

T = TypeVar("T")

_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SluiceError)
}
_ABORTED = "Collective ops is aborted"
# Of these dtypes every device sums tensors over processes; others travel as float64.
SUMMED = (tf.float32, tf.float64, tf.int64)
# What a collective raises on the processes that are left, or on one that is cut off from them.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
)
# What TensorFlow writes around the words of an error: the node before, the operation after.
_NODE = re.compile(r"^\{\{[^}]*\}\}\s*|\s*\[Op:\w+\]")
# TensorFlow raises one error for memory and for disks.
_FULL_DISK = "No space left on device"


class Workers:
    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self.count = count_workers(strategy)
        self.index: int = strategy.cluster_resolver.task_id if self.count > 1 else 0
        # A collective keeps the shape that it first had: one function for each.
        self._sums: dict[tf.TensorSpec, Callable[[tf.Tensor], tf.Tensor]] = {}

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    def any(self, flag: bool) -> bool:
        if self.count == 1:
            return flag
        return float(self.sum(tf.constant(float(flag)))) > 0

    def share(self, decide: Callable[[], T]) -> T:
        """Returns, or raises, on every process what the chief decides: what JSON holds."""
        if self.count == 1:
            return decide()
        failure: SluiceError | None = None
        message: dict[str, Any] = {}
        if self.is_chief:
            try:
                message = {"value": decide()}
            except SluiceError as error:
                failure = error
                parts = (error.what, error.received, error.allowed, error.fix)
                texts = [None if part is None else str(part) for part in parts]
                message = {"error": [type(error).__name__, *texts]}
        message = self._send(message)
        if failure is not None:
            raise failure
        if "error" in message:
            name, what, received, allowed, fix = message["error"]
            raise _ERRORS[name](what, received=received, allowed=allowed, fix=fix)
        value: T = message["value"]
        return value

    def share_variables(self, variables: Iterable[tf.Variable]) -> None:
        """Sets variables, the same on all processes, to what they are on the chief."""
        if self.count == 1:
            return
        for variable in variables:
            value = variable.read_value()
            summed = self._from_chief(
                value if value.dtype in SUMMED else tf.cast(value, tf.float64)
            )
            variable.assign(tf.cast(summed, variable.dtype))

    def share_arrays(self, read: Callable[[], Mapping[str, tf.Tensor]]) -> dict[str, np.ndarray]:
        """Returns on every process arrays, of the types `SUMMED`, that the chief alone reads."""
        own = {n: np.asarray(a) for n, a in read().items()} if self.is_chief else {}
        dtypes = self.share(lambda: {name: str(array.dtype) for name, array in own.items()})
        shapes = self.share(lambda: {name: list(array.shape) for name, array in own.items()})
        arrays = {}
        for name, dtype in dtypes.items():
            arrays[name] = own.get(name, np.zeros(tuple(shapes[name]), np.dtype(dtype)))
            if self.count > 1 and arrays[name].size:
                arrays[name] = self._from_chief(tf.constant(arrays[name])).numpy()
        return arrays

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        encoded = json.dumps(message).encode()
        size = int(self._from_chief(tf.constant(len(encoded), tf.int64)))
        # Bytes travel as float32: every device sums them, and exactly.
        own = tf.constant(list(encoded) if self.is_chief else [0] * size, tf.float32)
        received = self._from_chief(own).numpy().astype("uint8").tobytes()
        decoded: dict[str, Any] = json.loads(received)
        return decoded

    def _from_chief(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value, given one of the same shape on each process."""
        return self.sum(value if self.is_chief else tf.zeros_like(value))

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of what each process gives, of one shape and of the types `SUMMED`."""
        spec = tf.TensorSpec(value.shape, value.dtype)
        if spec not in self._sums:
            # A partial of its own, or TensorFlow takes them for one function that it traces often.
            summed = functools.partial(self._sum_replicas)
            self._sums[spec] = tf.function(summed, input_signature=[spec])
        return self._sums[spec](value)

    def _sum_replicas(self, value: tf.Tensor) -> tf.Tensor:
        local = self.strategy.num_replicas_in_sync // self.count

        def take() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group % local, 0)
            return tf.where(is_first, value, tf.zeros_like(value))

        take = tf.autograph.experimental.do_not_convert(take)
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, self.strategy.run(take), None)


@contextmanager
def lost_worker_errors(workers: Workers) -> Iterator[None]:
    """Turns the failure of a collective into an InternalError that says what to do."""
    try:
        yield
    except LOST as error:
        if workers.count == 1:
            raise
        # The lines above the one that names the lost process name where the step was built.
        lines = [line for line in str(error).splitlines() if _ABORTED in line]
        raise InternalError(
            "training ended, as another of its processes ended or cannot be reached",
            received=f"worker {workers.index} of {workers.count}: "
            f"{lines[0] if lines else describe_error(error)}",
            fix="see what the other processes say, then start all of them again with --resume",
        ) from error


class NullWriter:
    """Stands for a log on the processes that write none."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *record: None


def describe_error(error: Exception) -> str:
    """Returns the first line of an error's message, or its type where it has none."""
    lines = str(error).splitlines()
    return (lines and _NODE.sub("", lines[0])) or type(error).__name__


@contextmanager
def disk_errors(what: str, fix: str) -> Iterator[None]:
    """Turns a write that failed, by TensorFlow's errors or OSError, into an InternalError."""
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        raise InternalError(what, received=describe_error(error), fix=fix) from error


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns a lack of memory into an InternalError that says what takes less."""
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        if _FULL_DISK in str(error):
            raise
        raise InternalError(
            "there is too little memory for this model and its batches",
            received=describe_error(error),
            fix="lower input.batch_size, or raise optimizer.accumulate_steps; for tables, lower "
            "model.embedding_dim, or the capacity or device_rows of dynamic ones; with more "
            "memory, --resume goes on",
        ) from error


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes.


def free_memory_bytes() -> int | None:
    """Returns the memory that the machine has left, its container allowing; None: not known."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return free if allowed == "max" else min(free, int(allowed))


def require_memory(what: str, needed: int, fix: str, of: str = "") -> None:
    """Refuses what takes more bytes than are free: the process would be killed; GPUs have more."""
    free = None if has_gpu() else free_memory_bytes()
    if free is not None and needed > free:
        allowed = f"{free:,} bytes, which are free"
        what = f"{what} does not fit in memory"
        raise ConfigError(what, received=f"{of}{needed:,} bytes", allowed=allowed, fix=fix)


def peak_device_memory_bytes() -> dict[str, int]:
    """Returns the most memory, in bytes, that TensorFlow has held on each GPU of this process."""
    devices = tf.config.list_logical_devices("GPU")
    names = [device.name.removeprefix("/device:") for device in devices]
    peaks = {name.lower().replace(":", " "): 0 for name in names}
    for name, key in zip(names, peaks, strict=True):
        with suppress(ValueError):  # Some allocators do not count.
            peaks[key] = int(tf.config.experimental.get_memory_info(name)["peak"])
    return peaks
