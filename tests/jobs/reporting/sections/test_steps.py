from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jobs.reporting.blocks import Facts, Figure, Note
from jobs.reporting.run_data import RunData
from jobs.reporting.sections.steps import POINTS, build_steps
from tests.jobs.reporting.fixture_metrics import build_steps as write_steps


def lines(text: str) -> tuple[dict, ...]:
    return tuple(json.loads(line) for line in text.splitlines())


def test_curves_and_devices_are_shown(finished: RunData) -> None:
    card = {**finished.card, "devices": ["/device:GPU:0", "<b>"]}
    figure, facts = build_steps(replace(finished, card=card)).blocks
    assert isinstance(figure, Figure)
    for title in ("Loss", "Examples per second", "waited for input"):
        assert title in figure.svg
    assert "400 steps" in figure.svg
    assert "compiled loop" in figure.caption
    assert isinstance(facts, Facts)
    assert facts.items == (("Devices", "/device:GPU:0, <b>"),)


def test_a_long_run_is_drawn_by_few_points(finished: RunData) -> None:
    short = build_steps(replace(finished, steps=lines(write_steps(POINTS)))).blocks[0]
    long = build_steps(replace(finished, steps=lines(write_steps(20 * POINTS)))).blocks[0]
    assert "20 compiled loops" in long.caption
    assert len(long.svg) < 1.5 * len(short.svg)


@pytest.mark.parametrize("steps", [(), ({"step": "many"},), ({},)])
def test_a_run_without_steps_says_so(steps: tuple[dict, ...], finished: RunData) -> None:
    note = build_steps(replace(finished, steps=steps)).blocks[0]
    assert isinstance(note, Note)
    assert note.missing
