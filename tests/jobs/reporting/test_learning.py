from __future__ import annotations

import json
from dataclasses import replace
from xml.etree.ElementTree import tostring

import pytest

from jobs.reporting.run_data import RunData
from jobs.reporting.run_sections import STEP_POINTS, best_epoch, view_learning
from tests.jobs.reporting.fixtures import build_steps as write_steps
from tests.jobs.reporting.pages import show


def test_the_best_epoch_is_in_bold(finished):
    table = show("learning", finished).tables[0]
    bold = [row[0] for row, best in zip(table.rows, table.best, strict=True) if best[0]]
    assert bold == ["6"]


def test_the_best_epoch_comes_from_the_card_else_from_the_metric(finished):
    assert best_epoch(finished) == 6
    card = {**finished.card, "training": {}}
    assert best_epoch(replace(finished, card=card)) == 6
    named = replace(finished, card={**card, "training": {"best_epoch": 2}})
    assert best_epoch(named) == 2


def test_the_metric_of_early_stopping_is_shown(finished):
    assert "NDCG@10" in show("learning", finished).tables[0].columns
    config = {**finished.config, "fit": {"early_stopping": {"metric": "hit_rate@10"}}}
    shown = show("learning", replace(finished, card={**finished.card, "config": config}))
    assert "HR@10" in shown.tables[0].columns


def test_metrics_of_several_tasks_name_the_task(finished):
    epochs = ({"epoch": 1, "loss": 1.0, "validation": {"loss": 0.9, "auc": 0.6, "buy/auc": 0.7}},)
    model = {"kind": "ranking", "tasks": {"like": {}, "buy": {}}}
    card = {**finished.card, "config": {**finished.config, "model": model}}
    shown = show("learning", replace(finished, epochs=epochs, card=card))
    assert {row[0] for row in shown.tables[-1].rows} == {"Loss", "like AUC", "buy AUC"}


def test_training_loss_and_held_out_loss_are_two_curves_and_what_chose_is_shown(finished):
    epochs = tuple(
        {"epoch": n + 1, "loss": loss, "validation": {"loss": held, "auc": auc}}
        for n, (loss, held, auc) in enumerate([(0.6, 0.5, 0.7), (0.4, 0.45, 0.8), (0.2, 0.6, 0.75)])
    )
    training = {**finished.card["training"], "best_epoch": 2, "selected_by": "auc"}
    config = {**finished.config, "model": {"kind": "ranking"}, "fit": {"early_stopping": {}}}
    card = {**finished.card, "config": config, "training": training}
    data = replace(finished, epochs=epochs, card=card)
    shown = show("learning", data)
    assert "AUC" in shown.tables[0].columns
    assert [row[1:3] for row in shown.tables[0].rows] == [
        ["0.6000", "0.7000"], ["0.4000", "0.8000"], ["0.2000", "0.7500"]
    ]  # fmt: skip
    assert [row[0] for row in shown.tables[-1].rows] == ["AUC", "Loss"]
    by_loss = {**card, "training": {**training, "selected_by": "loss"}}
    curves = view_learning(replace(data, card=by_loss))["curves"]
    assert curves == {"Loss": [0.6, 0.4, 0.2], "Loss on validation": [0.5, 0.45, 0.6]}
    unnamed = {**card, "training": {}}  # a run that goes on
    assert "AUC" in show("learning", replace(data, card=unnamed)).tables[0].columns


def test_without_validation_it_says_so(finished):
    epochs = tuple({**entry, "validation": {}} for entry in finished.epochs)
    card = {**finished.card, "training": {}}
    shown = show("learning", replace(finished, epochs=epochs, card=card))
    assert "No validation split" in shown.notes[-1]
    assert best_epoch(replace(finished, epochs=epochs, card=card)) is None


def test_ties_go_to_the_earlier_epoch_and_missing_values_lose(finished):
    epochs = tuple(
        {"epoch": n + 1, "loss": 1.0, "validation": {"ndcg@10": value}}
        for n, value in enumerate((0.2, 0.3, 0.3, None))
    )
    card = {**finished.card, "training": {}}
    assert best_epoch(replace(finished, epochs=epochs, card=card)) == 2


def test_the_epoch_with_the_least_error_is_the_best(finished):
    errors = (0.9, 0.4, 0.7)
    epochs = tuple(
        {"epoch": n + 1, "loss": 1.0, "validation": {"rmse": error}}
        for n, error in enumerate(errors)
    )
    data = _with_fit(replace(finished, epochs=epochs), early_stopping={"metric": "rmse"})
    assert best_epoch(replace(data, card={**data.card, "training": {}})) == 2


def test_what_happened_to_keys_is_told(finished):
    found = {"keys": 41, "admitted": 1234, "evicted": 7, "bytes": 2048, "waiting": 3}
    epochs = (*finished.epochs[:-1], {**finished.epochs[-1], "tables": {"items": found}})
    before, shown = (
        show("learning", data) for data in (finished, replace(finished, epochs=epochs))
    )
    assert len(shown.tables) == len(before.tables) + 1
    row = shown.tables[-1].rows[0]
    assert row[:6] == ["items", str(len(epochs)), "41", "3", "1,234", "7"]
    assert row[-1] == "2.0 kB"


def test_what_the_input_left_out_is_told(finished):
    lost = {"bad_records": 2404, "shards": 1}
    epochs = (*finished.epochs[:-1], {**finished.epochs[-1], "left_out": lost})
    assert show("learning", replace(finished, epochs=epochs)).notes[-1] == (
        "Left out of the last epoch: 2,404 damaged record(s), 1 damaged or missing shard(s)."
    )
    whole = tuple({**entry, "left_out": {}} for entry in finished.epochs)
    notes = show("learning", replace(finished, epochs=whole)).notes
    assert not any("Left out" in text for text in notes)


def test_no_epoch_yet(finished):
    shown = show("learning", replace(finished, epochs=()))
    assert shown.missing == ["No epoch of this run has finished yet."]
    assert (shown.tables, shown.plots) == ([], [])


def _with_fit(data, **fit):
    return replace(data, card={**data.card, "config": {**data.config, "fit": fit}})


def test_without_early_stopping_the_last_epoch_was_kept(finished):
    data = _with_fit(finished, early_stopping=None)
    shown = show("learning", data)
    assert "last epoch's weights were kept" in shown.lead
    assert best_epoch(data) is None
    assert not any(best for row in shown.tables[0].best for best in row)
    assert "ring" not in shown.captions[0]
    chosen = show("learning", finished)
    assert "ring" in chosen.captions[0]
    assert "best epoch's weights were kept" in chosen.lead


def test_the_loss_chooses_without_a_validation_split(finished):
    epochs = tuple(
        {"epoch": n + 1, "loss": loss, "validation": {}} for n, loss in enumerate((3.0, 1.0, 2.0))
    )
    data = _with_fit(replace(finished, epochs=epochs), early_stopping={"metric": "loss"})
    data = replace(data, card={**data.card, "training": {}})
    assert best_epoch(data) == 2
    assert "best epoch's weights were kept" in show("learning", data).lead


def lines(text: str) -> tuple[dict, ...]:
    return tuple(json.loads(line) for line in text.splitlines())


def test_curves_and_devices_are_shown(finished: RunData) -> None:
    card = {**finished.card, "devices": ["/device:GPU:0", "<b>"]}
    shown = show("steps", replace(finished, card=card))
    text = "".join(shown.plots[0].itertext())
    for title in ("Loss", "Examples per second", "waited for input"):
        assert title in text
    assert "400 steps" in shown.plots[0].get("aria-label")
    assert "compiled loop" in shown.captions[0]
    assert shown.facts == {"Devices": "/device:GPU:0, <b>"}


def test_a_long_run_is_drawn_by_few_points(finished: RunData) -> None:
    short = show("steps", replace(finished, steps=lines(write_steps(STEP_POINTS))))
    long = show("steps", replace(finished, steps=lines(write_steps(20 * STEP_POINTS))))
    assert "20 compiled loops" in long.captions[0]
    assert len(tostring(long.plots[0])) < 1.5 * len(tostring(short.plots[0]))


@pytest.mark.parametrize("steps", [(), ({"step": "many"},), ({},)])
def test_a_run_without_steps_says_so(steps: tuple[dict, ...], finished: RunData) -> None:
    shown = show("steps", replace(finished, steps=steps))
    assert shown.missing
    assert shown.plots == []


def test_validations_between_epochs_are_shown(finished: RunData) -> None:
    assert not show("steps", finished).details
    found = tuple(
        {"step": 4 * n, "epoch": 1, "validation": {"auc": auc, "log_loss": 0.5}}
        for n, auc in ((1, 0.6), (2, 0.75), (3, None))
    )
    card = {**finished.card, "training": {"best_step": 8}}
    shown = show("steps", replace(finished, validations=found, card=card))
    assert len(shown.plots) == 2
    assert "the weights after step 8 were kept" in shown.captions[1]
    ((_, is_open, table),) = shown.details
    assert not is_open
    assert table.tables[0].columns == ["Step", "AUC", "Log loss"]
    assert table.tables[0].row("8") == ["8", "0.7500", "0.5000"]
    assert table.tables[0].best_of("8")[0]


def test_a_run_on_all_rows_tells_how_it_was_chosen(finished: RunData) -> None:
    chosen = {"values": {"model.temperature": 0.1}, "value": 0.16213, "epoch": 17}
    refit = {"metric": "ndcg@20", "trials": [{}] * 8, "chosen": chosen}
    lead = show("learning", replace(finished, card={**finished.card, "refit": refit})).lead
    assert "model.temperature 0.1" in lead
    assert "NDCG@20 0.1621 after epoch 17, the best of 8 trials" in lead
    assert "held-out rows" not in show("learning", finished).lead
    epochs = tuple({**entry, "validation": {}} for entry in finished.epochs)
    card = {**finished.card, "training": {}, "refit": {**refit, "trials": [{}]}}
    shown = show("learning", replace(finished, epochs=epochs, card=card))
    assert "the best of 1 trial." in shown.lead
    assert not any("nothing could be chosen" in note for note in shown.notes)
