from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jobs.reporting.run_data import RankedList
from jobs.reporting.run_sections import (
    build_verdict,
    describe_protocol,
    headline_metric,
    headline_protocol,
    wilson_interval,
)
from tests.jobs.reporting.pages import show


def _with(finished, model, popularity, metric="hit_rate@10", rows=1500):
    systems = {"model": {metric: model}}
    if popularity is not None:
        systems["popularity"] = {metric: popularity}
    protocol = {"name": "full_all", "mask_seen": False, "candidates": 800, "systems": systems}
    metrics = {"split": "test", "rows": rows, "headline": "full_all", "protocols": [protocol]}
    return build_verdict(replace(finished, metrics=metrics))


def test_a_clearly_better_model_is_ahead_by_the_ratio(finished):
    verdict = _with(finished, 0.24, 0.08)
    assert verdict.outcome == "ahead"
    assert verdict.sentence == (
        "DSSM finds the next item in its top 10 for 24.0% of the rows, 3.0 times popularity's 8.0%."
    )


def test_a_difference_within_the_noise_is_not_called_better(finished):
    assert _with(finished, 0.21, 0.20, rows=200).outcome == "level"
    assert _with(finished, 0.21, 0.20, rows=200_000).outcome == "ahead"


def test_a_worse_model_is_said_to_be_worse(finished):
    verdict = _with(finished, 0.02, 0.09)
    assert verdict.outcome == "behind"
    assert "worse than popularity" in verdict.sentence


def test_popularity_at_zero_gives_no_ratio(finished):
    verdict = _with(finished, 0.2, 0.0)
    assert verdict.outcome == "ahead"
    assert "times" not in verdict.sentence


def test_two_systems_that_never_hit_are_level(finished):
    assert _with(finished, 0.0, 0.0).outcome == "level"


def test_a_metric_that_is_no_rate_has_no_interval(finished):
    verdict = _with(finished, 0.12, 0.05, metric="ndcg@10")
    assert verdict.sentence == "DSSM reaches NDCG@10 0.1200, 2.4 times popularity's 0.0500."
    assert "interval" not in verdict.detail


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


@pytest.mark.parametrize(("rate", "rows"), [(0.1, 500), (0.5, 100), (0.02, 1000)])
def test_the_interval_holds_the_true_rate_19_times_in_20(rate, rows):
    draws = np.random.default_rng(0).binomial(rows, rate, 4000) / rows
    inside = [low <= rate <= high for low, high in (wilson_interval(d, rows) for d in draws)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_the_interval_stays_inside_the_unit_range():
    assert wilson_interval(0.0, 3)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(1.0, 3)[1] == pytest.approx(1.0, abs=1e-12)
    assert all(0 <= bound <= 1 for rate in (0.0, 1.0) for bound in wilson_interval(rate, 3))


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
    assert table.row("HR@10") == ["HR@10", "0.2213", "0.0929", "0.0133", "2.38\u00d7"]
    assert table.best_of("HR@10") == [False, True, False, False, False]


def _with_systems(finished, systems):
    protocol = finished.metrics["protocols"][0]
    metrics = {**finished.metrics, "protocols": [{**protocol, "systems": systems}]}
    return show("quality", replace(finished, metrics=metrics)).tables[0]


def test_the_best_may_be_popularity(finished):
    table = _with_systems(finished, {"model": {"mrr": 0.1}, "popularity": {"mrr": 0.3}})
    assert table.best_of("MRR") == [False, False, True, False]


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
    # Slices come last: rows, then the model beside popularity.
    assert tables[-1].rows[1] == ["10-99", "1,100", "0.2000", "0.2000", "0.1473", "0.0511"]
    assert len(show("quality", replace(finished, metrics={**metrics, "slices": {}})).tables) == 1


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
