"""Steps of a run: how many there are, where calls end, and the validations between epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conf.training.train import EarlyStoppingConfig, FitConfig
from training.checkpoint.checkpoint_files import Position, ResumeState
from training.distribution.workers import NullWriter
from training.loop.early_stopping import find_best
from training.monitoring.run_logs import EpochLog, StepValidation, StepValidationLog


@dataclass(frozen=True)
class StepPlan:
    """How many steps a run has, and where its compiled calls end.

    Attributes:
        steps_per_epoch: Whole batches of an epoch.
        total: Steps of the run if nothing stops it early; its last epoch may have fewer.
        steps_per_loop: Most steps of a call.
        stops: Calls end at the multiples of these numbers, counted over the run.
    """

    steps_per_epoch: int
    total: int
    steps_per_loop: int
    stops: tuple[int, ...] = ()

    @classmethod
    def of(cls, fit: FitConfig, steps_per_epoch: int) -> StepPlan:
        """Returns the plan of a config."""
        between = None if fit.validation is None else fit.validation.every_steps
        every = (fit.checkpoint.every_steps, between)
        return cls(
            steps_per_epoch,
            fit.count_steps(steps_per_epoch),
            fit.steps_per_loop,
            tuple(steps for steps in every if steps is not None),
        )

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total // self.steps_per_epoch)

    def count_steps_of_epoch(self, epoch: int) -> int:
        """Returns the steps of a zero-based epoch."""
        return min(self.steps_per_epoch, self.total - epoch * self.steps_per_epoch)

    def count_steps_of_call(self, position: Position) -> int:
        """Returns how many steps to run in one call.

        Calls end at fixed positions, whichever position a run is resumed at: at multiples of
        `steps_per_loop` inside the epoch, at the stops, and with the epoch.
        """
        batch, done = position.batch, position.step(self.steps_per_epoch)
        loop = self.steps_per_loop - batch % self.steps_per_loop
        left = self.count_steps_of_epoch(position.epoch) - batch
        return min([left, loop, *(stop - done % stop for stop in self.stops)])


Measure = Callable[[ResumeState], Mapping[str, float]]


class StepValidations:
    """Validations every some steps: when they are due, and what they have found.

    Args:
        every_steps: Steps between them, counted over the run.
        stopping: Early stopping by these validations, its metric set; None: they choose nothing.
        records: What they found before the run was resumed.
        logs: `validations.jsonl` and TensorBoard; unwritten by all processes but the chief.
        measure: Returns the metrics of the model at a state.

    Attributes:
        records: What they have found so far.
    """

    def __init__(
        self,
        every_steps: int,
        stopping: EarlyStoppingConfig | None,
        records: Sequence[StepValidation],
        logs: tuple[StepValidationLog | NullWriter, EpochLog | NullWriter],
        measure: Measure,
    ) -> None:
        self.records = list(records)
        self._every_steps, self._stopping = every_steps, stopping
        (self._log, self._board), self._measure = logs, measure

    @property
    def best(self) -> StepValidation | None:
        """The validation that chooses the weights; None: an epoch does, or there is none yet."""
        if self._stopping is None or self._stopping.metric is None or not self.records:
            return None
        return self.records[find_best(self.records, self._stopping.metric)]

    def is_due(self, step: int) -> bool:
        """Whether a validation is to be made after so many steps of the run."""
        done = self.records[-1].step if self.records else 0
        return step > done and step % self._every_steps == 0

    def update(self, state: ResumeState, step: int) -> bool:
        """Validates; returns whether the weights are the best so far.

        Args:
            state: Where the run stands.
            step: Steps of the run so far.
        """
        record = StepValidation(step, state.position.epoch + 1, dict(self._measure(state)))
        self.records.append(record)
        self._log.write(record)
        scalars = {f"step_validation/{name}": v for name, v in record.validation.items()}
        self._board.write_scalars(step, scalars)
        return self.best is record

    def should_stop(self) -> bool:
        """Whether the metric has not improved for `patience` validations."""
        if self._stopping is None or self._stopping.metric is None or not self.records:
            return False
        best = find_best(self.records, self._stopping.metric)
        return len(self.records) - 1 - best >= self._stopping.patience
