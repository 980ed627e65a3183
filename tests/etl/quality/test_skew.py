from __future__ import annotations

import math

import pyarrow as pa
import pytest

from conf.errors import ConfigError, ExitCode, InputDataError
from etl.quality.skew import SkewConfig, compare_features, refuse_skew

SCHEMA = pa.schema(
    [("id", pa.int64()), ("price", pa.float32()), ("tags", pa.list_(pa.int64())),
     ("vector", pa.list_(pa.float32())), ("name", pa.string())]
)  # fmt: skip
ROWS = [
    (1, 1.0, [1, 2], [0.1, 0.2], "a"),
    (2, 2.0, [3], [0.3], "b"),
    (3, None, None, None, None),
    (4, math.nan, [], [math.nan], ""),
    (5, 5.0, [1], [1.0], "e"),
    (6, 6.0, [1], [1.0], "f"),
]
FEATURES = ("price", "tags", "vector", "name")


def table(rows, schema=SCHEMA) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def mismatched(report) -> dict[str, int]:
    return {skew["name"]: skew["mismatched"] for skew in report["features"]}


def test_equal_rows_differ_in_nothing_and_each_difference_is_found():
    shards = [table(ROWS), table([(6, 6.5, [1], [1.0], "f")])]
    logged = table(
        [
            (1, 1.0 + 1e-7, [1, 2], [0.1, 0.2 + 1e-8], "a"),  # equal but for rounding
            (2, 2.5, [3, 3], [0.3, 0.0], "B"),  # all differ
            (3, None, None, None, None),
            (4, math.nan, [], [math.nan], ""),
            (5, None, None, None, None),  # all missing
            (6, 6.0, [1], [1.0], "f"),  # the dataset has two of them
            (9, 1.0, [1], [1.0], "z"),  # the dataset has none
        ]
    )
    report = compare_features(logged, shards, SkewConfig(("id",), FEATURES))
    assert [report[k] for k in ("logged", "recomputed", "compared", "ambiguous")] == [7, 7, 5, 1]
    assert mismatched(report) == dict.fromkeys(FEATURES, 2)
    (price,) = [skew for skew in report["features"] if skew["name"] == "price"]
    assert price["rate"] == pytest.approx(0.4)
    assert [tuple(example.values()) for example in price["examples"]] == [
        (["2"], "2.5", "2.0"),
        (["5"], None, "5.0"),
    ]
    refuse_skew(report, 0.4)
    with pytest.raises(InputDataError, match="4 of 4 features are skewed") as error:
        refuse_skew(report, 0.39)
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert "price: 2 rows differ (40.0000%), as 2: logged 2.5, recomputed 2.0" in str(error.value)


def test_a_list_without_a_value_is_as_none():
    schema = pa.schema(
        [("user", pa.int64()), ("recent", pa.list_(pa.int64())), ("of", pa.list_(pa.float32()))]
    )
    logged = table([(2, [], []), (3, [5], [0.5]), (4, None, [1.0])], schema)
    dataset = table([(2, None, None), (3, [], None), (4, [], [1.0])], schema)
    found = compare_features(logged, [dataset], SkewConfig(("user",), ("recent", "of")))
    assert mismatched(found) == {"recent": 1, "of": 1}


NUMBERS = pa.schema([("id", pa.int64()), ("n", pa.int64())])


def test_types_of_a_log_are_taken_as_the_records_types_and_unknown_ids_are_no_key():
    recomputed = table([(1, 7), (2, 8), (3, 9), (4, 1), (None, 1)], NUMBERS)
    logged = pa.table({"id": ["1", "2", "3", "4", None], "n": [0.0, 8.0, 9.0, 5.0, 1.0]})
    config = SkewConfig(("id",), ("n",), id_keys={"id": 3})  # 1: unknown, 2: a bucket
    report = compare_features(logged, [recomputed], config)
    assert (report["compared"], report["features"][0]["mismatched"]) == (2, 1)
    for value in ("x", 7.5):
        with pytest.raises(InputDataError, match="not of the type"):
            compare_features(pa.table({"id": [1], "n": [value]}), [recomputed], config)


def test_nothing_to_compare_is_refused():
    rows = table([(1, 2)], NUMBERS)
    with pytest.raises(ConfigError):
        compare_features(rows, [rows], SkewConfig(("id",), ()))
    apart = table([(5, 2)], NUMBERS)
    report = compare_features(rows, [apart], SkewConfig(("id",), ("n",)))
    with pytest.raises(InputDataError, match="nothing was compared"):
        refuse_skew(report, 0.5)
