"""The config of `fit.refit`: what is tried on held-out rows before a run trains on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from conf.config_base import StrictFinite
from conf.metrics import build_stopping_pattern
from conf.training.input import ROWS_OF_TRIALS

FIXED_KEYS = {
    "root": "says where runs lie",
    "name": "says where runs lie",
    "evaluation": "decides what trials are compared by",
}
"""Keys that no trial may change, with the reason."""
_FIXED = {
    **FIXED_KEYS,
    "dataset": "is the same for all trials",
    **dict.fromkeys(ROWS_OF_TRIALS, "decides which rows trials are compared on"),
    "fit.refit": "is of the run, not of its trials",
}


def is_within(key: str, other: str) -> bool:
    """Whether a config key is another one, or lies below it."""
    return key == other or key.startswith(f"{other}.")


def refuse_fixed(keys: Iterable[str], fixed: Mapping[str, str]) -> None:
    """Refuses keys to try that are fixed, lie below one that is, or hold one.

    Args:
        keys: Config keys, such as `optimizer.learning_rate`.
        fixed: Key -> why trials may not change it.

    Raises:
        ValueError: A key is.
    """
    for key in keys:
        for name, why in fixed.items():
            if is_within(key, name):
                raise ValueError(f"{key} {why} and cannot be tried")
            if is_within(name, key):
                raise ValueError(f"{key} cannot be tried: its {name} {why}")


class RefitConfig(StrictFinite):
    """Chooses settings and epochs on held-out rows, then trains a fresh model on all rows."""

    space: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        {},
        description="Config key -> values to try. Keys are tried one after the other, each with "
        "the best values of those before it. Empty: the config alone; its best epoch is chosen.",
    )
    metric: str | None = Field(
        None,
        pattern=build_stopping_pattern(),
        description="What trials are compared by. None: fit.early_stopping.metric.",
    )

    @field_validator("space")
    @classmethod
    def _may_be_tried(cls, space: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        refuse_fixed(space, _FIXED)
        return space

    @property
    def most_trials(self) -> int:
        """Trials in all, at most: of the same settings there is one."""
        return sum(map(len, self.space.values())) or 1
