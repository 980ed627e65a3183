from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from tests.bench.embedding import main as measure_keys
from tests.bench.measurements import Bar, BenchReport, Measurement
from tests.bench.ranking.__main__ import main as measure_networks
from tests.bench.train_step.__main__ import main
from tests.bench.train_step.sections import StepSettings, judge_wall_time, measure_growth
from tests.bench.train_step.trainings import BatchShape


def test_bars_are_judged_by_wall_time() -> None:
    fast = Measurement("s", "x", "fast", wall_s=1.0, cpu_s=4.0, rows=100)
    slow = Measurement("s", "x", "slow", wall_s=6.0, cpu_s=6.0, rows=100)
    gain, cost = judge_wall_time(
        [fast, slow], [Bar("fast", "slow", 5.0), Bar("slow", "fast", 1.2, at_least=False)]
    )
    assert (gain.wall_ratio, gain.ratio, gain.is_met) == (6.0, 1.5, True)
    assert (round(cost.wall_ratio, 6), cost.is_met) == (6.0, False)


def test_a_table_that_does_not_fit_is_skipped_with_its_size() -> None:
    report = BenchReport({})
    settings = StepSettings(8, 4, "adam", 1)
    assert measure_growth(report, settings, 1000, 10**12, 8) == []
    assert "96000.0 GB" in report.skipped[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_prints_all_figures(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    options = (
        "--batch 16 --length 5 --repeats 1 --small-rows 1000 --large-rows 4000 --rows 1000 --dim 4"
    )
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    main()
    figures = json.loads(file.read_text())
    assert len(figures["measurements"]) == 9
    assert len(figures["verdicts"]) == 6
    assert figures["settings"]["profile"]["ResourceGather"] > 0
    # 1 warm-up of 3 steps and a round of 20, each with new items in every batch.
    assert figures["measurements"][-1]["details"]["rows"] > 23 * 16 * 5 // 10
    assert "Keras fit, Adam" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_keys_under_rules_are_measured(tmp_path, monkeypatch) -> None:
    file = tmp_path / "figures.json"
    options = "--keys 20000 --swept 300000 --rows 1000 --batch 16 --length 5 --dim 4 --repeats 1"
    options += " --tiered 20000 --device 2000"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    measure_keys()
    figures = json.loads(file.read_text())
    found = {m["name"]: m for m in figures["measurements"]}
    assert found["all at once"]["details"]["evicted"] > 10_000
    assert 24 < found["find + count + touch"]["details"]["bytes_per_key"] <= 48
    assert {"all rows on the device", "2,000 of them"} <= set(found)
    assert len(figures["verdicts"]) == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranking_networks_are_measured(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    options = "--batch 16 --vocabulary-size 100 --few-rows 2600 --many-rows 26000 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    measure_networks()
    figures = json.loads(file.read_text())
    assert [m["rows"] for m in figures["measurements"]] == [16] * 3
    assert figures["settings"]["profile of deepfm"]["ResourceGather"] > 0
    assert figures["settings"]["profile of din"]["ResourceGather"] > 0
    assert figures["skipped"] == ["deepctr: --deepctr PYTHON names none"]


SHAPE = BatchShape(64, 10, 1000, distinct=4)


def ids(dataset) -> np.ndarray:
    batches = dataset.take(SHAPE.distinct).as_numpy_iterator()
    return np.concatenate([batch["history"].ravel() for batch in batches])


def test_ids_follow_zipf_all_over_the_table() -> None:
    counts = np.sort(np.bincount(ids(SHAPE.build()), minlength=1000))[::-1]
    # Of 2,560 draws the first rank gets one in H(998) = 7.5, the second half as many.
    assert 250 < counts[0] < 430
    assert 1.4 < counts[0] / counts[1] < 2.9
    frequent = np.argsort(-np.bincount(ids(SHAPE.build()), minlength=1000))[:20]
    assert frequent.max() > 500
    assert frequent.min() < 500
    assert ids(SHAPE.build()).min() >= 2


def test_batches_are_the_same_each_time_and_spread_by_a_factor() -> None:
    np.testing.assert_array_equal(ids(SHAPE.build()), ids(SHAPE.build()))
    np.testing.assert_array_equal(ids(SHAPE.build(spread=7)), 7 * ids(SHAPE.build()))


def test_unique_ids_are_counted_over_histories_and_items() -> None:
    count = BatchShape(8, 5, 1002, distinct=1)
    batch = next(iter(count.build()))
    found = len({*batch["history"].numpy().ravel().tolist(), *batch["item"].numpy().tolist()})
    assert count.count_unique() == found


def test_new_items_arrive_in_every_batch() -> None:
    known: set[int] = set(range(1000))
    for batch in SHAPE.build_arriving(0.1).take(2 * SHAPE.distinct).as_numpy_iterator():
        new = batch["history"][batch["history"] >= 1000].tolist()
        assert len(new) == 64
        assert not known & set(new)
        known |= set(new)
