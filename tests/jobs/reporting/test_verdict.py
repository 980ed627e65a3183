from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jobs.reporting.verdict import (
    build_verdict,
    describe_protocol,
    headline_metric,
    headline_protocol,
    wilson_interval,
)


def _with(finished, model, popularity, metric="hit_rate@10", rows=1500):
    systems = {"model": {metric: model}}
    if popularity is not None:
        systems["popularity"] = {metric: popularity}
    protocol = {"name": "full_all", "mask_seen": False, "candidates": 800, "systems": systems}
    metrics = {"split": "test", "rows": rows, "headline": "full_all", "protocols": [protocol]}
    return build_verdict(replace(finished, metrics=metrics))


def test_a_clearly_better_model_is_ahead_by_the_ratio(finished):
    verdict = _with(finished, 0.24, 0.08)
    assert verdict.standing == "ahead"
    assert verdict.sentence == (
        "DSSM finds the next item in its top 10 for 24.0% of the rows, 3.0 times popularity's 8.0%."
    )


def test_a_difference_within_the_noise_is_not_called_better(finished):
    assert _with(finished, 0.21, 0.20, rows=200).standing == "level"
    assert _with(finished, 0.21, 0.20, rows=200_000).standing == "ahead"


def test_a_worse_model_is_said_to_be_worse(finished):
    verdict = _with(finished, 0.02, 0.09)
    assert verdict.standing == "behind"
    assert "worse than popularity" in verdict.sentence


def test_popularity_at_zero_gives_no_ratio(finished):
    verdict = _with(finished, 0.2, 0.0)
    assert verdict.standing == "ahead"
    assert "times" not in verdict.sentence


def test_two_systems_that_never_hit_are_level(finished):
    assert _with(finished, 0.0, 0.0).standing == "level"


def test_a_metric_that_is_no_rate_has_no_interval(finished):
    verdict = _with(finished, 0.12, 0.05, metric="ndcg@10")
    assert verdict.sentence == "DSSM reaches NDCG@10 0.1200, 2.4 times popularity's 0.0500."
    assert "interval" not in verdict.detail


def test_no_popularity_no_comparison(finished):
    assert _with(finished, 0.12, None).standing == "unknown"


def test_no_evaluation_says_so(finished):
    verdict = build_verdict(replace(finished, metrics=None, gaps={"metrics": "why"}))
    assert (verdict.standing, verdict.detail) == ("unknown", "why")
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
