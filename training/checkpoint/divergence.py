"""The error of a run whose numbers are no longer finite."""

from __future__ import annotations

from conf.errors import TrainingDivergedError
from training.checkpoint.resume_state import Position


def build_divergence_error(
    received: str, position: Position, *, has_temperature: bool = False
) -> TrainingDivergedError:
    """Returns the error that ends a run whose numbers are no longer finite.

    Args:
        received: The number that is not finite.
        position: The batch that it was found after.
        has_temperature: Whether the model divides its scores by one.
    """
    further = ", or raise model.temperature" if has_temperature else ""
    return TrainingDivergedError(
        f"training diverged in epoch {position.epoch + 1}, at step {position.batch + 1}",
        received=received,
        allowed="finite numbers",
        fix=f"lower optimizer.learning_rate, set optimizer.clip_norm{further}; the checkpoints of "
        "earlier steps are untouched",
    )
