from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jobs.reporting.blocks import Facts, Figure, Note
from jobs.reporting.learning import STEP_POINTS, best_epoch, build_learning, build_steps
from jobs.reporting.run_data import RunData
from tests.jobs.reporting.fixtures import build_steps as write_steps


def _table(section):
    return section.blocks[0].blocks[1]


def test_the_best_epoch_is_in_bold(finished):
    bold = [row[0].text for row in _table(build_learning(finished)).rows if row[0].best]
    assert bold == ["6"]


def test_the_best_epoch_comes_from_the_card_else_from_the_metric(finished):
    assert best_epoch(finished) == 6
    card = {**finished.card, "training": {}}
    assert best_epoch(replace(finished, card=card)) == 6
    named = replace(finished, card={**card, "training": {"best_epoch": 2}})
    assert best_epoch(named) == 2


def test_the_metric_of_early_stopping_is_shown(finished):
    titles = [column.title for column in _table(build_learning(finished)).columns]
    assert "NDCG@10" in titles
    config = {**finished.config, "fit": {"early_stopping": {"metric": "hit_rate@10"}}}
    section = build_learning(replace(finished, card={**finished.card, "config": config}))
    assert "HR@10" in [column.title for column in _table(section).columns]


def test_without_validation_it_says_so(finished):
    epochs = tuple({**entry, "validation": {}} for entry in finished.epochs)
    card = {**finished.card, "training": {}}
    section = build_learning(replace(finished, epochs=epochs, card=card))
    assert "No validation split" in section.blocks[-1].text
    assert best_epoch(replace(finished, epochs=epochs, card=card)) is None


def test_ties_go_to_the_earlier_epoch_and_missing_values_lose(finished):
    epochs = tuple(
        {"epoch": n + 1, "loss": 1.0, "validation": {"ndcg@10": value}}
        for n, value in enumerate((0.2, 0.3, 0.3, None))
    )
    card = {**finished.card, "training": {}}
    assert best_epoch(replace(finished, epochs=epochs, card=card)) == 2


def test_what_the_input_left_out_is_told(finished):
    lost = {"bad_records": 2404, "shards": 1}
    epochs = (*finished.epochs[:-1], {**finished.epochs[-1], "left_out": lost})
    assert build_learning(replace(finished, epochs=epochs)).blocks[-1] == Note(
        "Left out of the last epoch: 2,404 damaged record(s), 1 damaged or missing shard(s)."
    )
    whole = tuple({**entry, "left_out": {}} for entry in finished.epochs)
    blocks = build_learning(replace(finished, epochs=whole)).blocks
    assert not any("Left out" in block.text for block in blocks if isinstance(block, Note))


def test_no_epoch_yet(finished):
    section = build_learning(replace(finished, epochs=()))
    assert section.blocks == (Note("No epoch of this run has finished yet.", missing=True),)


def _with_fit(data, **fit):
    return replace(data, card={**data.card, "config": {**data.config, "fit": fit}})


def test_without_early_stopping_the_last_epoch_was_kept(finished):
    data = _with_fit(finished, early_stopping=None)
    section = build_learning(data)
    assert "last epoch's weights were kept" in section.lead
    assert best_epoch(data) is None
    assert not any(cell.best for row in _table(section).rows for cell in row)
    figure = section.blocks[0].blocks[0]
    assert "ring" not in figure.caption
    assert "best epoch's weights were kept" in build_learning(finished).lead


def test_the_loss_chooses_without_a_validation_split(finished):
    epochs = tuple(
        {"epoch": n + 1, "loss": loss, "validation": {}} for n, loss in enumerate((3.0, 1.0, 2.0))
    )
    data = _with_fit(replace(finished, epochs=epochs), early_stopping={"metric": "loss"})
    data = replace(data, card={**data.card, "training": {}})
    assert best_epoch(data) == 2
    assert "best epoch's weights were kept" in build_learning(data).lead


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
    short = build_steps(replace(finished, steps=lines(write_steps(STEP_POINTS)))).blocks[0]
    long = build_steps(replace(finished, steps=lines(write_steps(20 * STEP_POINTS)))).blocks[0]
    assert "20 compiled loops" in long.caption
    assert len(long.svg) < 1.5 * len(short.svg)


@pytest.mark.parametrize("steps", [(), ({"step": "many"},), ({},)])
def test_a_run_without_steps_says_so(steps: tuple[dict, ...], finished: RunData) -> None:
    note = build_steps(replace(finished, steps=steps)).blocks[0]
    assert isinstance(note, Note)
    assert note.missing
