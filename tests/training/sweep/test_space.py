from __future__ import annotations

from conf.training.sweep import SweepConfig
from training.sweep.space import list_grid, read_values, suggest_values


class FixedTrial:
    """Takes the first choice, and the low end; keeps what it was asked."""

    def __init__(self) -> None:
        self.params: dict[str, object] = {}

    def suggest_categorical(self, key: str, choices: list[str]) -> str:
        self.params[key] = choices[0]
        return choices[0]

    def suggest_int(self, key: str, low: int, high: int, *, step: int, log: bool) -> int:
        assert isinstance(low, int)
        self.params[key] = low
        return low

    def suggest_float(self, key: str, low: float, high: float, *, step: object, log: bool) -> float:
        self.params[key] = low
        return low


SWEEP = SweepConfig.model_validate(
    {
        "trials": 5,
        "space": {
            "a": [[64, 32], None],
            "b": {"low": 1, "high": 9, "integer": True},
            "c": {"low": 0.1, "high": 0.2},
        },
    }
)


def test_values_of_any_kind_come_back_as_they_were_written() -> None:
    trial = FixedTrial()
    values = suggest_values(trial, SWEEP)
    assert values == {"a": [64, 32], "b": 1, "c": 0.1}
    assert read_values(trial.params, SWEEP) == values


def test_a_grid_lists_every_point_once() -> None:
    grid = SweepConfig.model_validate(
        {"sampler": "grid", "space": {"a": [1, "x"], "b": [True, None, [2]]}}
    )
    points = [read_values(point, grid) for point in list_grid(grid)]
    assert len(points) == 6
    assert points[0] == {"a": 1, "b": True}
    assert points[-1] == {"a": "x", "b": [2]}
