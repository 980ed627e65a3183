from __future__ import annotations

from dataclasses import replace

from jobs.reporting.blocks import Beside, Figure, Note, Table
from jobs.reporting.sections.quality import build_quality


def _tables(section):
    blocks = [b for block in section.blocks for b in getattr(block, "blocks", (block,))]
    return [block for block in blocks if isinstance(block, Table)]


def _row(table, name):
    return next(row for row in table.rows if row[0].text == name)


def test_every_protocol_has_a_table_and_the_headline_has_bars(finished):
    section = build_quality(finished)
    captions = [table.caption for table in _tables(section)]
    assert captions[0].startswith("Full ranking, unseen items")
    assert [c.partition(":")[0] for c in captions[1:3]] == [
        "Full ranking, all items", "99 sampled negatives",
    ]  # fmt: skip
    first = section.blocks[0]
    assert isinstance(first, Beside)
    assert isinstance(first.blocks[0], Figure)


def test_values_the_best_and_the_ratio(finished):
    row = _row(_tables(build_quality(finished))[0], "HR@10")
    assert [cell.text for cell in row] == ["HR@10", "0.2213", "0.0929", "0.0133", "2.38\u00d7"]
    assert [cell.best for cell in row] == [False, True, False, False, False]


def test_the_best_may_be_popularity(finished):
    protocol = finished.metrics["protocols"][0]
    systems = {"model": {"mrr": 0.1}, "popularity": {"mrr": 0.3}}
    metrics = {**finished.metrics, "protocols": [{**protocol, "systems": systems}]}
    row = _row(_tables(build_quality(replace(finished, metrics=metrics)))[0], "MRR")
    assert [cell.best for cell in row] == [False, False, True, False]


def test_recall_is_shown_only_where_it_differs(finished):
    assert "Recall" not in str(_tables(build_quality(finished))[0])
    protocol = finished.metrics["protocols"][0]
    systems = {"model": {"hit_rate@5": 0.4, "recall@5": 0.2}}
    metrics = {**finished.metrics, "protocols": [{**protocol, "systems": systems}]}
    assert _row(_tables(build_quality(replace(finished, metrics=metrics)))[0], "Recall@5")


def test_labels_without_calibrated_scores_say_why(finished):
    section = build_quality(finished)
    assert _row(_tables(section)[-1], "AUC")[1].best
    notes = [block.text for block in section.blocks if isinstance(block, Note)]
    assert any("No log loss" in text for text in notes)
    assert any("3 targets" in text for text in notes)


def test_no_labels_no_sampled_protocol(finished):
    metrics = {**finished.metrics, "labels": None, "beyond_accuracy": {}, "oov_targets": 0}
    metrics["protocols"] = metrics["protocols"][:1]
    assert len(_tables(build_quality(replace(finished, metrics=metrics)))) == 1


def test_not_evaluated(finished):
    section = build_quality(replace(finished, metrics=None, gaps={"metrics": "later"}))
    assert section.blocks == (Note("later", missing=True),)


def test_an_evaluation_without_protocols(finished):
    section = build_quality(replace(finished, metrics={"protocols": []}))
    assert section.blocks[0].missing
