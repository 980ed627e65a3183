from __future__ import annotations

from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.load import load_config
from conf.training.sweep import ChoicesConfig, RangeConfig, SweepConfig


def read(tmp_path: Path, text: str) -> SweepConfig:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    return load_config(SweepConfig, "training", str(file))


def test_a_file_of_lists_and_ranges(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        trials: 20
        space:
          model.embedding_dim: [16, 32]
          model.user_hidden_units: [[64], [64, 32], []]
          optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
        """,
    )
    assert found.trial_count == 20
    dims = found.space
    assert isinstance(dims["model.embedding_dim"], ChoicesConfig)
    rate = dims["optimizer.learning_rate"]
    assert isinstance(rate, RangeConfig)
    assert (rate.low, rate.high) == (1e-4, 1e-1)


def test_a_grid_has_as_many_trials_as_points(tmp_path: Path) -> None:
    grid = "sampler: grid\nspace: {seed: [1, 2, 3], fit.epochs: [1, 2]}\n"
    assert read(tmp_path, grid).trial_count == 6
    assert read(tmp_path, grid + "trials: 4\n").trial_count == 4
    assert read(tmp_path, grid + "trials: 40\n").trial_count == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trials: 2\nspace: {}", "space"),
        ("space: {seed: [1]}", "number of trials"),
        ("sampler: grid\nspace: {seed: {low: 1, high: 2}}", "grid needs lists"),
        ("trials: 2\nspace: {name: [a, b]}", "cannot be tried"),
        ("trials: 2\nspace: {seed: {low: 2, high: 1}}", "less than high"),
        ("trials: 2\nspace: {seed: {low: 0, high: 1, log: true}}", "low > 0"),
        ("trials: 2\nspace: {seed: {low: 0.5, high: 2, integer: true}}", "whole numbers"),
        ("trial: 2\nspace: {seed: [1]}", "trials"),
    ],
)
def test_what_cannot_be_tried_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)
