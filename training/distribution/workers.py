"""Agreement between the processes of a run: the chief decides and writes, the others follow.

With one process everything here does nothing. With several, each call is a collective: all
processes make the same calls in the same order. Nothing needs a disk that they share, but the
dataset.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from conf import errors
from conf.errors import InternalError, SluiceError
from training.distribution.strategy import count_workers
from training.distribution.tensorflow_runtime import describe_error

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


class Workers:
    """All processes of a run, seen from one of them.

    Args:
        strategy: The strategy that they train with.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self.count = count_workers(strategy)
        self.index: int = strategy.cluster_resolver.task_id if self.count > 1 else 0
        # A collective keeps the shape that it first had: one function for each.
        self._sums: dict[tf.TensorSpec, Callable[[tf.Tensor], tf.Tensor]] = {}

    @property
    def is_chief(self) -> bool:
        """Whether this process decides and writes."""
        return self.index == 0

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any process."""
        if self.count == 1:
            return flag
        return float(self.sum(tf.constant(float(flag)))) > 0

    def all(self, flag: bool) -> bool:
        """Returns whether the flag is set on all processes."""
        return not self.any(not flag)

    def share(self, decide: Callable[[], T]) -> T:
        """Returns on every process what the chief decides.

        Args:
            decide: Called by the chief alone; returns what JSON holds.

        Raises:
            SluiceError: The chief raised it; it is raised on all processes.
        """
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
        """Returns on every process the arrays that the chief reads, of the types `SUMMED`.

        Args:
            read: Called by the chief alone.
        """
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
        """Sums the values of all processes' first replicas."""
        local = self.strategy.num_replicas_in_sync // self.count

        def take() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group % local, 0)
            return tf.where(is_first, value, tf.zeros_like(value))

        take = tf.autograph.experimental.do_not_convert(take)
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, self.strategy.run(take), None)


@contextmanager
def lost_worker_errors(workers: Workers) -> Iterator[None]:
    """Turns the failure of a collective into an error that says what to do.

    Raises:
        InternalError: Another process has ended, or cannot be reached.
    """
    try:
        yield
    except LOST as error:
        if workers.count == 1:
            raise
        raise InternalError(
            "training ended, as another of its processes ended or cannot be reached",
            received=f"worker {workers.index} of {workers.count}: {_describe(error)}",
            fix="see what the other processes say, then start all of them again with --resume",
        ) from error


def _describe(error: tf.errors.OpError) -> str:
    """The line that names the lost process; the lines above it name where the step was built."""
    lines = [line for line in str(error).splitlines() if _ABORTED in line]
    return lines[0] if lines else describe_error(error)


class NullWriter:
    """Stands for a log on the processes that write none."""

    def write(self, *record: Any) -> None:
        """Drops a record."""

    def write_scalars(self, *record: Any) -> None:
        """Drops numbers."""

    def sync(self) -> None:
        """Nothing to bring to the disk."""

    def close(self) -> None:
        """Nothing to end."""
