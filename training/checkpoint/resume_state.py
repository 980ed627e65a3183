"""Resume state: input position, epoch sums, all that an exact resume needs beside tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import TrainingDivergedError


@dataclass(frozen=True, order=True)
class Position:
    """The batch that training reads next.

    Attributes:
        epoch: Zero-based epoch; so many epochs are finished.
        batch: Zero-based batch of that epoch; so many of its batches are trained. The number of
            steps per epoch stands for an epoch that is trained and not yet validated.
    """

    epoch: int
    batch: int

    def step(self, steps_per_epoch: int) -> int:
        """Returns the number of steps before this position, over all epochs."""
        return self.epoch * steps_per_epoch + self.batch


@dataclass(frozen=True)
class EpochSums:
    """Sums over the steps of an epoch that are done.

    Attributes:
        loss: Sum of the steps' losses.
        wait_s: Seconds that the steps waited for their batches.
        seconds: Wall time of the steps.
    """

    loss: float = 0.0
    wait_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class ResumeState:
    """What a bit-exact resume needs besides the variables.

    Every draw of training is a function of the run's seed and of a counter: the epoch for the
    order of records, the optimizers' step, which is one of the variables, for dropout and
    negatives. Seed and counters are the whole state of random numbers.

    Attributes:
        position: The next batch.
        sums: Sums of the epoch that the position is in.
        seed: The run's seed.
    """

    position: Position
    sums: EpochSums
    seed: int

    def after(self, steps: int, loss: float, wait_s: float, seconds: float) -> ResumeState:
        """Returns the state some steps further in the same epoch.

        Args:
            steps: The steps.
            loss: Sum of their losses.
            wait_s: Seconds that they waited for their batches.
            seconds: Their wall time.
        """
        position = Position(self.position.epoch, self.position.batch + steps)
        sums = EpochSums(
            self.sums.loss + loss, self.sums.wait_s + wait_s, self.sums.seconds + seconds
        )
        return ResumeState(position, sums, self.seed)


def parse_resume_state(content: Mapping[str, Any]) -> ResumeState:
    """Returns the resume state that `dataclasses.asdict` made a mapping of."""
    parts = {
        "position": Position(**content["position"]),
        "sums": EpochSums(**content["sums"]),
    }
    return ResumeState(**{**content, **parts})


def build_divergence_error(
    received: str, position: Position, *, has_temperature: bool = False, advice: str = ""
) -> TrainingDivergedError:
    """Returns the error that ends a run whose numbers are no longer finite.

    Args:
        received: The number that is not finite.
        position: The batch that it was found after.
        has_temperature: Whether the model divides its scores by one.
        advice: What helps where it is not a lower rate.
    """
    further = ", or raise model.temperature" if has_temperature else ""
    lower = f"lower optimizer.learning_rate, set optimizer.clip_norm{further}"
    return TrainingDivergedError(
        f"training diverged in epoch {position.epoch + 1}, at step {position.batch + 1}",
        received=received,
        allowed="finite numbers",
        fix=f"{advice or lower}; the checkpoints of earlier steps are untouched",
    )
