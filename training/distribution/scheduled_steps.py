"""Steps that the chief of parameter servers gives out to workers, batch by batch."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from training.distribution.cluster import find_silent
from training.distribution.parameter_server import POLL_S, ParameterServers, build_lost_error
from training.distribution.run_steps import StepFunction, StepsResult

STEPS_PER_WORKER = 4
"""Batches that are given out at once per worker: one in work, the others so that none waits."""


class StepCounter(Protocol):
    """What counts the steps of a run."""

    step: tf.Variable

    def set_step(self, step: int) -> None:
        """Says how many steps are done."""


class ScheduledSteps:
    """Runs several steps on the workers and waits for all of them: a `RunSteps`.

    Each batch is sent to one worker, which computes a step with the variables as they are by then
    and updates them. A worker that dies has its batch given to another one.

    Args:
        strategy: The processes.
        train_step: One step.
        optimizers: Count the steps.
    """

    def __init__(
        self, strategy: ParameterServers, train_step: StepFunction, optimizers: StepCounter
    ) -> None:
        self._strategy, self._optimizers = strategy, optimizers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._train_step, self._compiled = train_step, None
        self._results = _Results()
        self._most_given_out = STEPS_PER_WORKER * len(strategy.cluster.workers)

    def __call__(self, iterator: Any, steps: tf.Tensor) -> StepsResult:
        """Runs steps, fewer where a loss is not finite.

        Args:
            iterator: Gives batches, on the chief.
            steps: int32 scalar.

        Returns:
            Losses in the order in which batches were given out, up to the first that is not
            finite. None of the steps is under way any more.

        Raises:
            InternalError: A worker is gone, and no step has ended since.
            tf.errors.OpError: A parameter server is lost, or the input is damaged.
        """
        first = int(self._optimizers.step.read_value())
        wait_s, given_out = 0.0, 0
        losses: list[float] = []
        while given_out < int(steps) and all(map(math.isfinite, losses[-1:])):
            asked = time.monotonic()
            batch = iterator.get_next()
            wait_s += time.monotonic() - asked
            self._results.put(self._coordinator.schedule(self._compile(iterator), args=(batch,)))
            given_out += 1
            if given_out - len(losses) == self._most_given_out:
                losses.append(self._take_loss())
        losses += [self._take_loss() for _ in range(given_out - len(losses))]
        self._coordinator.join()
        broken = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
        del losses[broken[0] + 1 if broken else len(losses) :]
        # The steps count themselves, and two may read one count: here it is set to what it is.
        self._optimizers.set_step(first + len(losses))
        return StepsResult(
            tf.constant(np.array(losses, np.float32)), tf.constant(wait_s, tf.float64)
        )

    def _compile(self, iterator: Any) -> Any:
        if self._compiled is None:
            self._compiled = tf.function(
                lambda batch: self._strategy.run(self._train_step, args=(batch,)),
                input_signature=[iterator.element_spec],
                autograph=False,
            )
        return self._compiled

    def _take_loss(self) -> float:
        """Returns the next loss; gives up where none can be expected."""
        asked = time.monotonic()
        found = self._results.take(POLL_S)
        while found is None:
            is_late = time.monotonic() - asked > self._strategy.timeout_s
            if is_late and find_silent(self._strategy.cluster.workers):
                raise build_lost_error(self._strategy.cluster, "no step has ended since")
            found = self._results.take(POLL_S)
        if isinstance(found, Exception):
            self._coordinator.join()  # Raises the cause, where this is what followed from it.
            raise found
        return found


class _Results:
    """Fetches results in a thread: TensorFlow's `fetch` waits for ever."""

    def __init__(self) -> None:
        self._values: queue.Queue[Any] = queue.Queue()
        self._fetched: queue.Queue[float | Exception] = queue.Queue()
        threading.Thread(target=self._fetch, daemon=True, name="fetch-results").start()

    def put(self, value: Any) -> None:
        """Adds what `schedule` has returned."""
        self._values.put(value)

    def take(self, timeout_s: float) -> float | Exception | None:
        """Returns the result that was added first, or what it raised; None: not there yet."""
        try:
            return self._fetched.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _fetch(self) -> None:
        while True:
            try:
                self._fetched.put(float(self._values.get().fetch()))
            except Exception as error:  # Raised where the result is taken.
                self._fetched.put(error)
