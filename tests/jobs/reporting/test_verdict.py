from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jobs.reporting.quality import (
    build_verdict,
    describe_protocol,
    headline_metric,
    headline_protocol,
)
from jobs.reporting.run_data import RankedList
from jobs.support.formatting import MISSING
from tests.jobs.reporting.pages import show


def _with(finished, model, popularity, metric="hit_rate@10", interval=(None, None)):
    systems = {"model": {metric: model}}
    protocol = {"name": "full_all", "mask_seen": False, "candidates": 800, "systems": systems}
    if popularity is not None:
        systems["popularity"] = {metric: popularity}
        found = {"difference": model - popularity, "low": interval[0], "high": interval[1],
                 "method": "bootstrap over users"}  # fmt: skip
        against = {"popularity": {metric: found}}
        protocol["differences"] = {"level": 0.95, "groups": 12, "against": against}
    metrics = {"split": "test", "rows": 1500, "headline": "full_all", "protocols": [protocol]}
    return build_verdict(replace(finished, metrics=metrics))


def test_a_clearly_better_model_is_ahead_by_the_ratio(finished):
    verdict = _with(finished, 0.24, 0.08, interval=(0.14, 0.18))
    assert verdict.outcome == "ahead"
    assert verdict.sentence == (
        "DSSM finds the next item in its top 10 for 24.0% of the rows, 3.0 times popularity's 8.0%."
    )
    assert "+0.1600, 95% interval +0.1400 to +0.1800 (bootstrap over users)" in verdict.detail


@pytest.mark.parametrize("metric", ["hit_rate@10", "ndcg@10", "mrr", "map@10"])
def test_the_paired_interval_decides_for_any_metric(finished, metric):
    """The same values: only the interval of their difference tells noise from a lead."""
    assert _with(finished, 0.21, 0.20, metric, (-0.01, 0.03)).outcome == "level"
    assert _with(finished, 0.21, 0.20, metric, (0.005, 0.015)).outcome == "ahead"
    assert _with(finished, 0.19, 0.20, metric, (-0.015, -0.005)).outcome == "behind"
    assert _with(finished, 0.21, 0.20, metric).outcome == "unknown"


def test_figures_per_user_are_told_as_such(finished):
    metrics = json.loads(json.dumps(finished.metrics))
    metrics["protocols"][0]["per"] = "user"
    sentence = build_verdict(replace(finished, metrics=metrics)).sentence
    assert "finds a held-out item in its top 10 for 22.1% of the users" in sentence


def test_a_worse_model_is_said_to_be_worse(finished):
    verdict = _with(finished, 0.02, 0.09, interval=(-0.08, -0.06))
    assert verdict.outcome == "behind"
    assert "worse than popularity" in verdict.sentence


def test_popularity_at_zero_gives_no_ratio(finished):
    verdict = _with(finished, 0.2, 0.0, interval=(0.1, 0.3))
    assert verdict.outcome == "ahead"
    assert "times" not in verdict.sentence


def test_two_systems_that_never_hit_are_level(finished):
    assert _with(finished, 0.0, 0.0, interval=(0.0, 0.0)).outcome == "level"


def test_too_few_users_give_no_verdict(finished):
    verdict = _with(finished, 0.3, 0.1)
    assert verdict.sentence.endswith("for 30.0% of the rows; popularity has 10.0%.")
    assert "12 users are too few for an interval" in verdict.detail


def test_a_run_of_before_has_no_interval_and_is_not_called_ahead(finished):
    protocols = [{k: v for k, v in p.items() if k != "differences"}
                 for p in finished.metrics["protocols"]]  # fmt: skip
    data = replace(finished, metrics={**finished.metrics, "protocols": protocols})
    verdict = build_verdict(data)
    assert verdict.outcome == "unknown"
    assert "No paired interval was measured: sluice evaluate does that" in verdict.detail
    assert "times" not in verdict.sentence
    assert show("quality", data).tables[0].row("HR@10")[-1] == MISSING


def test_no_popularity_no_comparison(finished):
    assert _with(finished, 0.12, None).outcome == "unknown"


def test_no_evaluation_says_so(finished):
    verdict = build_verdict(replace(finished, metrics=None, gaps={"metrics": "why"}))
    assert (verdict.outcome, verdict.detail) == ("unknown", "why")
    assert "not evaluated" in verdict.sentence


def test_headline_is_the_named_protocol_else_the_first():
    protocols = [{"name": "a"}, {"name": "b"}]
    assert headline_protocol({"headline": "b", "protocols": protocols}) == {"name": "b"}
    assert headline_protocol({"headline": "c", "protocols": protocols}) == {"name": "a"}
    assert headline_protocol({"protocols": []}) is None


def test_hit_rate_at_10_is_preferred_and_any_metric_will_do():
    assert headline_metric({"model": {"mrr": 0.1, "hit_rate@10": 0.2}}) == "hit_rate@10"
    assert headline_metric({"model": {"hit_rate@50": 0.2}}) == "hit_rate@50"
    assert headline_metric({}) is None


def test_a_sampled_protocol_is_not_described_as_the_catalogue():
    text = describe_protocol({"name": "sampled_99", "candidates": 100}, {"rows": 10})
    assert "up to 100 candidates" in text
    assert "catalogue" not in text


def test_every_protocol_has_a_table_and_the_headline_has_bars(finished):
    shown = show("quality", finished)
    captions = [table.caption for table in shown.tables]
    assert captions[0].startswith("Full ranking, unseen items")
    assert [c.partition(":")[0] for c in captions[1:3]] == [
        "Full ranking, all items", "99 sampled negatives",
    ]  # fmt: skip
    first = next(shown.root.iter("div"))
    assert first.get("class") == "beside"
    assert [len(list(part.iter("figure"))) for part in first] == [1, 0]


def test_values_the_best_and_the_ratio(finished):
    table = show("quality", finished).tables[0]
    assert table.row("HR@10") == [
        "HR@10", "0.2213", "0.0929", "0.0133", "2.38\u00d7", "+0.1284 (+0.1027 to +0.1540)",
    ]  # fmt: skip
    assert table.best_of("HR@10") == [False, True, False, False, False, False]


def _with_systems(finished, systems):
    protocol = finished.metrics["protocols"][0]
    metrics = {**finished.metrics, "protocols": [{**protocol, "systems": systems}]}
    return show("quality", replace(finished, metrics=metrics)).tables[0]


def test_the_best_may_be_popularity(finished):
    table = _with_systems(finished, {"model": {"mrr": 0.1}, "popularity": {"mrr": 0.3}})
    assert table.best_of("MRR") == [False, False, True, False, False]


def test_ease_stands_next_to_the_model_or_is_named_as_left_out(finished):
    systems = {"popularity": {"mrr": 0.1}, "ease": {"mrr": 0.4}, "model": {"mrr": 0.3}}
    table = _with_systems(finished, systems)
    assert table.row("MRR")[1:4] == ["0.3000", "0.4000", "0.1000"]
    assert table.best_of("MRR")[2]
    metrics = {
        **finished.metrics,
        "baselines": {"ease": {"left_out": "20,000 items take 17.9 GiB"}},
    }
    shown = show("quality", replace(finished, metrics=metrics))
    assert "EASE is left out: 20,000 items take 17.9 GiB." in shown.notes
    fitted = {"items": 9459, "l2": 100.0, "users": 500, "pairs": 7000, "pairs_outside": 1200}
    shown = show("quality", replace(finished, metrics={**metrics, "baselines": {"ease": fitted}}))
    [line] = [note for note in shown.notes if note.startswith("EASE: ")]
    assert "it knows the 9,459 most frequent items, and not those of 1,200 further pairs" in line


def test_recall_is_shown_only_where_it_differs(finished):
    shown = show("quality", finished)
    assert not any("Recall" in row[0] for row in shown.tables[0].rows)
    assert "Recall@k equals HR@k here: one relevant item per row." in shown.notes
    table = _with_systems(finished, {"model": {"hit_rate@5": 0.4, "recall@5": 0.2}})
    assert table.row("Recall@5")


def test_labels_without_calibrated_scores_say_why(finished):
    shown = show("quality", finished)
    assert shown.tables[-2].best_of("AUC")[1]
    assert any("No log loss" in text for text in shown.notes)
    assert any("3 targets" in text for text in shown.notes)


def test_no_labels_no_sampled_protocol(finished):
    metrics = {**finished.metrics, "labels": None, "beyond_accuracy": {}, "oov_targets": 0}
    metrics["protocols"] = metrics["protocols"][:1]
    tables = show("quality", replace(finished, metrics=metrics)).tables
    assert len(tables) == 2
    # Slices come last: rows, then the model beside popularity, named as in the table of all rows.
    assert tables[-1].columns[2:4] == ["HR@10, model", "HR@10, popularity"]
    assert tables[-1].rows[1] == ["10-99", "1,100", "0.2000", "0.2000", "0.1473", "0.0511"]
    assert len(show("quality", replace(finished, metrics={**metrics, "slices": {}})).tables) == 1


def _task(metric, model, constant, interval, auc=None):
    low, high = interval
    found = {"difference": model - constant, "low": low, "high": high, "method": "bootstrap"}
    slices = {"user_frequency": [{"value": "1-9", "rows": 4, "systems": {"model": {metric: 0.5}}}]}
    values = {"kind": "binary", metric: model, "constant": {metric: constant}, "slices": slices}
    differences = {"level": 0.95, "groups": 40, "against": {"constant": {metric: found}}}
    return {**values, "differences": differences, **({} if auc is None else {"auc": auc})}


def _with_tasks(finished, **tasks):
    return replace(finished, metrics={"split": "test", "rows": 9, "tasks": tasks})


def test_an_error_below_the_constants_is_ahead(finished):
    task = _task("log_loss", 0.5, 0.6, (-0.12, -0.08), auc=0.7)
    verdict = build_verdict(_with_tasks(finished, click=task))
    assert verdict.outcome == "ahead"
    assert verdict.sentence == (
        "DSSM reaches AUC 0.7000 and log loss 0.5000: better than a constant (0.6000)."
    )
    for interval, outcome in (((-0.1, 0.02), "level"), ((0.01, 0.02), "behind")):
        task = _task("rmse", 0.5, 0.6, interval)
        assert build_verdict(_with_tasks(finished, rating=task)).outcome == outcome
    without = _task("rmse", 0.5, 0.6, (None, None))
    del without["differences"]
    assert build_verdict(_with_tasks(finished, rating=without)).outcome == "unknown"


def test_every_table_of_several_tasks_says_which(finished):
    """`like` comes first in the config, and would come last by name."""
    own = (-0.12, -0.08)
    like, click = (_task("log_loss", value, 0.6, own, auc=0.7) for value in (0.5, 0.4))
    data = _with_tasks(finished, like=like, click=click)
    shown = show("quality", data)
    assert [table.caption for table in shown.tables] == [
        "Task like, binary.", "Task click, binary.",
        "By user frequency, task like.", "By user frequency, task click.",
    ]  # fmt: skip
    assert shown.tables[0].row("like Log loss")[1:] == [
        "0.5000", "0.6000", "-0.1000 (-0.1200 to -0.0800)",
    ]  # fmt: skip
    assert shown.tables[1].row("click AUC")
    assert shown.tables[2].columns[2] == "like Log loss, model"
    verdict = build_verdict(data)
    assert "log loss 0.5000 of task like" in verdict.sentence
    one = show("quality", _with_tasks(finished, like=like))
    assert one.tables[0].row("AUC")
    assert one.tables[1].caption == "By user frequency."


def test_not_evaluated(finished):
    shown = show("quality", replace(finished, metrics=None, gaps={"metrics": "later"}))
    assert (shown.missing, shown.tables, shown.plots) == (["later"], [], [])


def test_an_evaluation_without_protocols(finished):
    assert show("quality", replace(finished, metrics={"protocols": []})).missing


def test_items_are_shown_by_title_with_their_scores(finished):
    first = finished.lists[0]
    row = show("lists", finished).tables[0].rows[0]
    assert row[0] == first.user
    assert row[1] == f"Film {first.items[0]} ({first.scores[0]:.3g})"


def test_without_titles_the_tokens(finished):
    row = show("lists", replace(finished, catalogue=None)).tables[0].rows[0]
    assert row[1].startswith(f"{finished.lists[0].items[0]} (")


def test_short_lists_and_lists_without_scores(finished):
    short = replace(finished, lists=(RankedList("u", ("5",), ()),), catalogue=None)
    assert show("lists", short).tables[0].rows[0] == ["u", "5", *[""] * 4]


def test_no_lists(finished):
    assert show("lists", replace(finished, lists=())).missing
