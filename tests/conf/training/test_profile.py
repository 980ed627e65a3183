from __future__ import annotations

import pytest

from conf.errors import ConfigError
from conf.training.profile import StepRange, parse_step_range


def test_two_numbers_are_a_range() -> None:
    assert parse_step_range("100:120") == StepRange(100, 120)
    parse_step_range("0:1").require_within(1)


@pytest.mark.parametrize("text", ["", "5", "a:b", "1:2:3", "-1:2", "1.5:2", " 1:2"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="two steps"):
        parse_step_range(text)


@pytest.mark.parametrize("text", ["5:5", "7:3"])
def test_an_empty_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        parse_step_range(text)


def test_a_range_beyond_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not have") as caught:
        StepRange(5, 25).require_within(24)
    assert caught.value.allowed == "0 to 24"
