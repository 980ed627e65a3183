from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.etl.logs import build_config


def contract(tmp_path, *rules, **settings):
    return build_config(tmp_path, tmp_path, contract={"rules": rules, **settings}).contract


def test_every_kind_of_rule_is_told_by_its_kind_and_names_its_target(tmp_path):
    found = contract(
        tmp_path,
        {"kind": "range", "source": "ratings", "column": "rating", "maximum": 5},
        {"kind": "null_rate", "feature": "gender", "maximum": 0.1, "severity": "warn"},
        {"kind": "unique", "source": "items", "columns": ["item"]},
        {"kind": "volume", "split": "train", "min_rows": 1},
        {"kind": "references", "source": "ratings", "column": "item", "dictionary": "items"},
    )
    assert [rule.target for rule in found.rules] == [
        "ratings.rating", "feature gender (train)", "items.item", "split train", "ratings.item",
    ]  # fmt: skip
    assert found.sources == {"ratings", "items"}
    assert [rule.severity for rule in found.rules] == ["error", "warn", *["error"] * 3]


WRONG = [
    ({"kind": "range", "source": "ratings", "column": "ratin", "maximum": 5}, "mean 'rating'"),
    ({"kind": "range", "source": "rating", "column": "rating", "maximum": 5}, "mean 'ratings'"),
    ({"kind": "range", "source": "users", "column": "gender", "maximum": 5}, "not a number"),
    ({"kind": "range", "source": "ratings", "column": "rating"}, "minimum"),
    ({"kind": "range", "feature": "rating", "maximum": 5, "max_rate": 0.1}, "max_rate"),
    ({"kind": "range", "feature": "item", "maximum": 5}, "ids of a vocabulary"),
    ({"kind": "range", "source": "ratings", "maximum": 5}, "source` and `column"),
    ({"kind": "domain", "source": "ratings", "column": "rating", "one_of": ["x"]}, "'x'"),
    ({"kind": "type", "source": "ratings", "column": "rating", "type": "string"}, "int64"),
    ({"kind": "drift", "feature": "item", "metric": "ks"}, "no order"),
    ({"kind": "drift", "feature": "iten"}, "mean 'item'"),
    ({"kind": "drift", "feature": "rating", "split": "trian"}, "mean 'train'"),
    ({"kind": "volume", "min_rows": 1}, "either `source` or `split`"),
    ({"kind": "volume", "source": "ratings"}, "needs min_rows"),
    ({"kind": "unique", "source": "items", "columns": ["tags"]}, "is a list"),
    ({"kind": "references", "source": "ratings", "column": "item", "dictionary": "ratings"}, "key"),
    ({"kind": "freshness", "source": "users", "column": "group", "max_age_hours": 1}, "number"),
    ({"kind": "fresh"}, "freshness"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "message"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path, rule, message):
    with pytest.raises(ValidationError, match=message):
        contract(tmp_path, rule)


def test_slices_are_features_beside_a_label(tmp_path):
    assert contract(tmp_path, slices=["gender"]).slices == ("gender",)
    with pytest.raises(ValidationError, match="no such feature"):
        contract(tmp_path, slices=["sex"])
    with pytest.raises(ValidationError, match="no label"):
        build_config(tmp_path, tmp_path, label=None, contract={"slices": ["gender"]})
