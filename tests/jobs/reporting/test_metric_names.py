from __future__ import annotations

from jobs.reporting.metric_names import metric_order, metric_title


def test_titles():
    names = ("hit_rate@10", "ndcg@5", "mrr", "custom@3")
    assert [metric_title(m) for m in names] == ["HR@10", "NDCG@5", "MRR", "custom@3"]


def test_cut_offs_are_ordered_as_numbers():
    shuffled = ["mrr", "ndcg@10", "hit_rate@10", "other", "hit_rate@5", "ndcg@5", "recall@1"]
    assert sorted(shuffled, key=metric_order) == [
        "hit_rate@5", "hit_rate@10", "ndcg@5", "ndcg@10", "recall@1", "mrr", "other",
    ]  # fmt: skip
