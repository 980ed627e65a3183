"""A dictionary's keys: one row each, or one version."""

from __future__ import annotations

import pytest

from conf.errors import InputDataError
from conf.etl import JoinConfig
from etl.joins import DictionaryJoin, check_unique_key


def test_versions_of_a_key_are_told_apart_and_repeats_are_refused(spark):
    rows = [("a", 1, 1), ("a", 1, 2), ("a", 2, 2), ("b", 1, 1)]
    dictionary = spark.createDataFrame(rows, "key string, since bigint, known bigint")
    as_of = {"valid_from": "since", "known_at": "known"}
    config = JoinConfig.model_validate({"source": "d", "column": "key", "as_of": as_of})
    columns = DictionaryJoin("d", "key", config).unique_columns
    assert columns == ("key", "since", "known")
    check_unique_key("d", dictionary, columns)
    with pytest.raises(InputDataError, match=r"not unique by its key \(key, since\)") as refused:
        check_unique_key("d", dictionary, columns[:2])
    assert "a 1 (2 rows)" in str(refused.value)
