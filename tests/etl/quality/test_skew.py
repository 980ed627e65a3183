from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from conf.errors import ConfigError, ExitCode, InputDataError
from etl.quality.skew import SkewConfig, compare_features, count_milliseconds, refuse_skew

SCHEMA = "id bigint, price float, tags array<bigint>, vector array<float>, name string"
ROWS = [
    (1, 1.0, [1, 2], [0.1, 0.2], "a"),
    (2, 2.0, [3], [0.3], "b"),
    (3, None, None, None, None),
    (4, math.nan, [], [math.nan], ""),
    (5, 5.0, [1], [1.0], "e"),
    (6, 6.0, [1], [1.0], "f"),
]
FEATURES = ("price", "tags", "vector", "name")


def test_equal_rows_differ_in_nothing_and_each_difference_is_found(spark):
    recomputed = spark.createDataFrame([*ROWS, (6, 6.5, [1], [1.0], "f")], SCHEMA)
    logged = spark.createDataFrame(
        [
            (1, 1.0 + 1e-7, [1, 2], [0.1, 0.2 + 1e-8], "a"),  # equal but for rounding
            (2, 2.5, [3, 3], [0.3, 0.0], "B"),  # all differ
            (3, None, None, None, None),
            (4, math.nan, [], [math.nan], ""),
            (5, None, None, None, None),  # all missing
            (6, 6.0, [1], [1.0], "f"),  # the dataset has two of them
            (9, 1.0, [1], [1.0], "z"),  # the dataset has none
        ],
        SCHEMA,
    )
    report = compare_features(logged, recomputed, SkewConfig(("id",), FEATURES))
    assert (report.logged, report.recomputed, report.compared, report.ambiguous) == (7, 7, 5, 1)
    assert {skew.name: skew.mismatched for skew in report.features} == dict.fromkeys(FEATURES, 2)
    (price,) = [skew for skew in report.features if skew.name == "price"]
    assert price.rate == pytest.approx(0.4)
    assert [(e.key, e.logged, e.recomputed) for e in price.examples] == [
        (("2",), "2.5", "2.0"),
        (("5",), None, "5.0"),
    ]
    refuse_skew(report, 0.4)
    with pytest.raises(InputDataError, match="4 of 4 features are skewed") as error:
        refuse_skew(report, 0.39)
    assert error.value.exit_code == ExitCode.INPUT_REFUSED
    assert "price: 2 rows differ (40.0000%), as 2: logged 2.5, recomputed 2.0" in str(error.value)


def test_a_list_without_a_value_is_as_none(spark):
    schema = "user bigint, recent array<bigint>, weights array<float>"
    logged = spark.createDataFrame([(2, [], []), (3, [5], [0.5]), (4, None, [1.0])], schema)
    dataset = spark.createDataFrame([(2, None, None), (3, [], None), (4, [], [1.0])], schema)
    found = compare_features(logged, dataset, SkewConfig(("user",), ("recent", "weights")))
    assert {skew.name: skew.mismatched for skew in found.features} == {"recent": 1, "weights": 1}


def test_types_of_json_are_taken_as_the_records_types_and_ids_out_of_it_are_no_key(spark):
    recomputed = spark.createDataFrame([(1, 7), (2, 8), (3, 9)], "id bigint, n bigint")
    logged = spark.createDataFrame([("1", "0"), ("2", "8"), ("3", "x")], "id string, n string")
    report = compare_features(logged, recomputed, SkewConfig(("id",), ("n",), id_keys={"id": 2}))
    assert (report.compared, report.features[0].mismatched) == (2, 1)  # id 1: out of vocabulary


def test_buckets_of_unknown_ids_are_no_key(spark) -> None:
    """Row 3 is of a bucket: the log's user need not be that of the dataset."""
    recomputed = spark.createDataFrame([(3, 7), (4, 8)], "id bigint, n bigint")
    logged = spark.createDataFrame([(3, 9), (4, 8)], "id bigint, n bigint")
    report = compare_features(logged, recomputed, SkewConfig(("id",), ("n",), id_keys={"id": 4}))
    assert (report.compared, report.features[0].mismatched) == (1, 0)


def test_times_are_milliseconds_and_another_unit_is_named(spark):
    recomputed = spark.createDataFrame([(1, 1_577_836_800_500), (2, 9)], "id bigint, at bigint")
    times = [
        (1, datetime(2020, 1, 1, 0, 0, 0, 500_000, UTC)),
        (2, datetime(1970, 1, 1, tzinfo=UTC)),
    ]
    logged = spark.createDataFrame(times, "id bigint, at timestamp")
    config = SkewConfig(("id",), ("at",))
    report = compare_features(count_milliseconds(logged), recomputed, config)
    assert report.features[0].mismatched == 1  # the second
    with pytest.raises(InputDataError, match="logged 0, recomputed 9") as refused:
        refuse_skew(report, 0)
    assert "1000 times" not in refused.value.render()
    seconds = recomputed.selectExpr("id", "at div 1000 as at").where("id = 1")
    thousandth = recomputed.where("id = 1").selectExpr("id", "at div 1000 * 1000 as at")
    with pytest.raises(InputDataError, match="seconds against milliseconds"):
        refuse_skew(compare_features(seconds, thousandth, config), 0)


def test_nothing_to_compare_is_refused(spark):
    frame = spark.createDataFrame([(1, 2)], "id bigint, n bigint")
    for config in (SkewConfig(("id",), ()), SkewConfig(("id",), ("m",))):
        with pytest.raises(ConfigError):
            compare_features(frame, frame, config)
    apart = spark.createDataFrame([(5, 2)], "id bigint, n bigint")
    report = compare_features(frame, apart, SkewConfig(("id",), ("n",)))
    with pytest.raises(InputDataError, match="nothing was compared"):
        refuse_skew(report, 0.5)
