"""Where a run stands: which batch of which epoch comes next, and what the epoch gave so far."""

from __future__ import annotations

from dataclasses import dataclass


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
class Standing:
    """All that a run needs, beside its variables, to go on to the bit.

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
