"""Which steps of a run are profiled: `--profile 100:120`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from conf.errors import ConfigError

_PATTERN = re.compile(r"([0-9]+):([0-9]+)")
_ALLOWED = "FROM:TO, whole numbers, FROM less than TO, such as 100:120"


@dataclass(frozen=True)
class StepRange:
    """Steps of a run, counted over all epochs.

    Attributes:
        start: Steps that are done when the range begins.
        end: Steps that are done when it ends.
    """

    start: int
    end: int

    def require_within(self, steps: int) -> None:
        """Refuses a range that a run of so many steps does not reach.

        Raises:
            ConfigError: The range ends after the run.
        """
        if self.end > steps:
            raise ConfigError(
                "--profile names steps that the run does not have",
                received=f"{self.start}:{self.end}",
                allowed=f"0 to {steps}",
                fix="name earlier steps, or raise fit.epochs",
            )


def parse_step_range(text: str) -> StepRange:
    """Reads `FROM:TO`.

    Raises:
        ConfigError: It is not two whole numbers, or the range is empty.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ConfigError("--profile must name two steps", received=text, allowed=_ALLOWED)
    start, end = map(int, found.groups())
    if start >= end:
        raise ConfigError("the range of --profile is empty", received=text, allowed=_ALLOWED)
    return StepRange(start, end)
