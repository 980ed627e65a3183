"""From a space of config keys to a trial's values, and from these to its config."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from conf.load import override_config
from conf.training import TrainConfig
from conf.training.sweep import ChoicesConfig, RangeConfig, SweepConfig


def suggest_values(trial: Any, sweep: SweepConfig) -> dict[str, Any]:
    """Returns a trial's value of each key; a trial that has values already keeps them.

    Args:
        trial: An Optuna trial.
        sweep: The space.
    """
    return {key: _suggest(trial, key, found) for key, found in sweep.space.items()}


def _suggest(trial: Any, key: str, found: ChoicesConfig | RangeConfig) -> Any:
    if isinstance(found, ChoicesConfig):
        return json.loads(trial.suggest_categorical(key, _texts(found)))
    if found.integer:
        step = 1 if found.step is None else int(found.step)
        return trial.suggest_int(key, int(found.low), int(found.high), step=step, log=found.log)
    return trial.suggest_float(key, found.low, found.high, step=found.step, log=found.log)


def list_grid(sweep: SweepConfig) -> list[dict[str, str]]:
    """Returns all points of a grid, the last key running fastest, as Optuna keeps them."""
    choices = [_texts(d) for d in sweep.space.values() if isinstance(d, ChoicesConfig)]
    return [dict(zip(sweep.space, point, strict=True)) for point in itertools.product(*choices)][
        : sweep.trial_count
    ]


def read_values(params: Mapping[str, Any], sweep: SweepConfig) -> dict[str, Any]:
    """Returns a finished trial's value of each key that it had one of."""
    return {
        key: json.loads(value) if isinstance(sweep.space[key], ChoicesConfig) else value
        for key, value in params.items()
    }


def check_space(config: TrainConfig, sweep: SweepConfig) -> None:
    """Refuses keys and values that the config does not take, before anything is trained.

    Each value is looked at alone; what does not go together ends its trial.

    Raises:
        ConfigError: A key is unknown, or a value or the end of a range is refused.
    """
    for key, found in sweep.space.items():
        tried = found.choices if isinstance(found, ChoicesConfig) else _ends(found)
        for value in tried:
            override_config(config, {key: value}, f"of the sweep, {key}")


def _ends(found: RangeConfig) -> tuple[float, float] | tuple[int, int]:
    ends = found.low, found.high
    return (int(ends[0]), int(ends[1])) if found.integer else ends


def _texts(found: ChoicesConfig) -> list[str]:
    """Choices as JSON: Optuna stores plain values only, and a choice may be a list."""
    return [json.dumps(choice) for choice in found.choices]
