"""Tables by name: the session's catalogue, their days, and an order that is theirs alone."""

from __future__ import annotations

import datetime

import pytest

from conf.dates import DateRange
from conf.errors import InputDataError
from tests.etl.sources.inputs import INT, declare, good, outcomes, read

DAY = datetime.date(2024, 3, 1)


@pytest.fixture
def table(spark):
    rows = [(i, f"2024-03-0{1 + i % 3}", DAY + datetime.timedelta(i % 3)) for i in range(9)]
    frame = spark.createDataFrame(rows, "id int, dt string, day date")
    frame.write.partitionBy("dt").mode("overwrite").saveAsTable("sluice_clicks")
    yield "default.sluice_clicks"
    spark.sql("DROP TABLE sluice_clicks")


def test_a_table_gives_only_the_days_of_the_run(spark, tmp_path, table):
    dt = {"name": "dt", "type": "string"}
    config = declare(INT, dt, format="table", table=table, days={"column": "dt"})
    run = DateRange(DAY, DAY + datetime.timedelta(1))
    source = read(spark, tmp_path, config, run)
    assert sorted(good(source)) == [(i, f"2024-03-0{1 + i % 3}") for i in range(9) if i % 3 < 2]
    scan = source.rows._jdf.queryExecution().executedPlan().toString()
    assert "PartitionFilters: [(isnull(dt" in scan
    by_date = {"name": "at", "field": "day", "type": "timestamp"}
    dated = declare(INT, by_date, format="table", table=table, days={"column": "at"})
    assert len(outcomes(read(spark, tmp_path, dated, run))) == 6
    with pytest.raises(InputDataError, match="nothing for 1"):
        read(spark, tmp_path, dated, DateRange(DAY, DAY + datetime.timedelta(3)))


def test_rows_of_a_table_have_one_order_however_it_is_stored(spark, tmp_path, table):
    config = declare(INT, format="table", table=table, new_columns="ignore")
    ordered = good(read(spark, tmp_path, config))
    assert sorted(ordered) == [(i,) for i in range(9)]
    spark.read.table(table).repartition(5, "id").createOrReplaceTempView("sluice_again")
    again = declare(INT, format="table", table="sluice_again", new_columns="ignore")
    assert good(read(spark, tmp_path, again)) == ordered


def test_a_table_that_is_not_there_is_refused(spark, tmp_path):
    with pytest.raises(InputDataError, match="no such table"):
        read(spark, tmp_path, declare(INT, format="table", table="nowhere.at_all"))
