"""Tables by name and by JDBC: their days, read in parts, credentials kept out of sight."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from jobs.support.spark_session import java_options
from tests.etl.sources.databases import (
    USER,
    Postgres,
    PostgresUnavailableError,
    connect_derby,
    driver_jar,
    start_postgres,
)
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, reasons

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
    with pytest.raises(InputDataError):
        read(spark, tmp_path, dated, DateRange(DAY, DAY + datetime.timedelta(3)))


def test_rows_of_a_table_have_one_order_however_it_is_stored(spark, tmp_path, table):
    config = declare(INT, format="table", table=table, new_columns="ignore")
    ordered = good(read(spark, tmp_path, config))
    assert sorted(ordered) == [(i,) for i in range(9)]
    spark.read.table(table).repartition(5, "id").createOrReplaceTempView("sluice_again")
    again = declare(INT, format="table", table="sluice_again", new_columns="ignore")
    assert good(read(spark, tmp_path, again)) == ordered


def test_a_table_that_is_not_there_is_refused(spark, tmp_path):
    with pytest.raises(InputDataError):
        read(spark, tmp_path, declare(INT, format="table", table="nowhere.at_all"))


DERBY = "jdbc:derby:memory:sluice;create=true"
ITEMS = [
    {"name": "id", "type": "int64"},
    {"name": "title", "type": "string", "nullable": True},
    {"name": "price", "type": "float32", "minimum": 0},
]


def source(**jdbc: Any) -> Any:
    options = {"url": DERBY, "dbtable": "ITEMS", **jdbc}
    return declare(*ITEMS, format="jdbc", jdbc=options, new_columns="ignore")


@pytest.fixture(scope="module")
def derby(spark) -> Iterator[str]:
    with connect_derby(spark, DERBY) as statement:
        statement.execute(
            "CREATE TABLE ITEMS (ID DECIMAL(22,0), TITLE VARCHAR(9), PRICE DOUBLE, SEEN TIMESTAMP)"
        )
        rows = [f"({i}, 'item {i}', {i}.5, NULL)" for i in range(1, 41)]
        rows += ["(9223372036854775808, 'beyond', 1, NULL)", "(41, NULL, -1, NULL)"]
        statement.execute(f"INSERT INTO ITEMS VALUES {', '.join(rows)}")
        yield DERBY
        statement.execute("DROP TABLE ITEMS")


def test_a_table_is_read_by_declared_types(spark, tmp_path, derby):
    rows = read(spark, tmp_path, source())
    assert sorted(good(rows)) == [(i, f"item {i}", i + 0.5) for i in range(1, 41)]
    assert sorted(reasons(rows)) == ["below_minimum:price", "not_int64:id"]
    bad = rows.bad.where("reason = 'not_int64:id'").first()
    assert "9223372036854775808" in bad["line"]


def test_options_of_spark_and_a_select_in_the_place_of_a_table(spark, tmp_path, derby):
    table = "(SELECT * FROM ITEMS WHERE ID BETWEEN 1 AND 40) chosen"
    cuts = {"partitionColumn": "id", "lowerBound": "1", "upperBound": "40", "numPartitions": "4"}
    rows = read(spark, tmp_path, source(dbtable=table, **cuts))
    sizes = [len(part) for part in rows.good.rdd.glom().collect()]
    assert sum(sizes) == 40
    assert len(sizes) == 4
    assert min(sizes) >= 7
    assert outcomes(rows) == outcomes(read(spark, tmp_path, source(dbtable=table)))


@pytest.fixture
def machine_in_tokyo(spark) -> Iterator[None]:
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Asia/Tokyo"))
    yield
    zones.setDefault(before)


def test_times_without_a_zone_are_utc_whatever_the_zone_of_the_machine(
    spark, tmp_path, derby, machine_in_tokyo
):
    at = {"name": "at", "field": "clicked", "type": "timestamp"}
    table = (
        "(SELECT ID, TIMESTAMP('2024-03-01 00:30:00') AS CLICKED FROM ITEMS WHERE ID = 1 "
        "UNION SELECT ID, TIMESTAMP('2024-02-29 23:30:00') AS CLICKED FROM ITEMS WHERE ID = 2) two"
    )
    midnight = 1_709_251_200_000
    ends = {"lowerBound": "2024-02-29 00:00:00", "upperBound": "2024-03-02 00:00:00"}
    for options in ({}, {"partitionColumn": "clicked", "numPartitions": "2", **ends}):
        jdbc = {"url": DERBY, "dbtable": table, **options}
        config = declare(INT, at, format="jdbc", jdbc=jdbc)
        rows = sorted(good(read(spark, tmp_path, config)))
        assert rows == [(1, midnight + 1_800_000), (2, midnight - 1_800_000)]
        dated = declare(INT, at, format="jdbc", jdbc=jdbc, days={"column": "at"})
        of_the_day = good(read(spark, tmp_path, dated, DateRange(DAY, DAY)))
        assert of_the_day == [(1, midnight + 1_800_000)]


def test_java_is_started_in_utc_where_no_hour_is_missing():
    assert "-Duser.timezone=UTC" in java_options()


@pytest.mark.parametrize(
    ("jdbc", "error"),
    [
        ({"url": "jdbc:nosuchdb://h/x"}, ConfigError),
        ({"driver": "no.such.Driver"}, ConfigError),
        ({"dbtable": "NO_SUCH_TABLE"}, InputDataError),
        ({"user_env": "SLUICE_NOT_SET"}, ConfigError),
    ],
)
def test_what_a_database_refuses_has_its_code(spark, tmp_path, derby, jdbc, error):
    with pytest.raises(error):
        read(spark, tmp_path, source(**jdbc))


def test_credentials_are_refused_in_a_url_and_in_options():
    for url in (
        "jdbc:postgresql://u:hunter2@h/db",
        "jdbc:postgresql://h/db?ssl=true&password=hunter2",
        "jdbc:sqlserver://h;user=u;pwd=hunter2",
        "jdbc:oracle:thin:scott/hunter2@//h:1521/x",
    ):
        with pytest.raises(ValidationError):
            source(url=url)
    with pytest.raises(ValidationError):
        source(Password="hunter2")
    for url in (DERBY, "jdbc:postgresql://h:5432/db?ssl=true", "jdbc:oracle:thin:@//h:1521/x"):
        assert source(url=url).jdbc["url"] == url


@pytest.fixture(scope="module")
def postgres(spark) -> Iterator[Postgres]:
    try:
        spark.sql(f"ADD JAR '{driver_jar()}'")
        with start_postgres() as server:
            server.run(
                "CREATE TABLE items (id bigint PRIMARY KEY, title text, price numeric(9,2));"
                "INSERT INTO items SELECT i, 'item ' || i, i / 4.0 FROM generate_series(1, 50) i;"
                "CREATE FUNCTION spoil() RETURNS bigint LANGUAGE sql AS "
                "'DELETE FROM items RETURNING id'"
            )
            yield server
    except PostgresUnavailableError as error:
        pytest.skip(str(error))


def postgres_source(server: Postgres, **jdbc: Any) -> Any:
    place = {"url": server.url, "dbtable": "items", "user_env": "SLUICE_DB_USER"}
    return source(**{"driver": "org.postgresql.Driver", **place, **jdbc})


SECRET = {"password_env": "SLUICE_DB_PASSWORD"}


def test_postgresql_is_read_in_parts_by_a_password_from_the_environment(
    spark, tmp_path, postgres, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("SLUICE_DB_USER", USER)
    monkeypatch.setenv("SLUICE_DB_PASSWORD", postgres.password)
    expected = [(i, f"item {i}", i / 4) for i in range(1, 51)]
    cuts = {"partitionColumn": "id", "lowerBound": "1", "upperBound": "50", "numPartitions": "5"}
    config = postgres_source(postgres, **SECRET, **cuts)
    rows = read(spark, tmp_path, config)
    assert rows.rows.rdd.getNumPartitions() == 5
    assert sorted(good(rows)) == expected
    plan = rows.rows._jdf.queryExecution().toString()
    for shown in (plan, json.dumps(config.model_dump(mode="json")), caplog.text):
        assert postgres.password not in shown


def test_postgresql_refuses_to_write_and_strangers(spark, tmp_path, postgres, monkeypatch):
    monkeypatch.setenv("SLUICE_DB_USER", USER)
    monkeypatch.setenv("SLUICE_DB_PASSWORD", postgres.password)
    chosen = "(SELECT spoil() AS id, 'x' AS title, 1 AS price) chosen"
    spoiling = postgres_source(postgres, dbtable=chosen, **SECRET)
    # A driver added to a running session keeps Spark from passing on what it threw.
    with pytest.raises(Exception, match=r"read-only transaction|UnknownReason"):
        good(read(spark, tmp_path, spoiling))
    whole = postgres_source(postgres, **SECRET)
    assert len(good(read(spark, tmp_path, whole))) == 50
    monkeypatch.setenv("SLUICE_DB_PASSWORD", "hunter2hunter2")
    with pytest.raises(InputDataError) as refused:
        read(spark, tmp_path, whole)
    assert "hunter2" not in str(refused.value)


def test_a_database_that_does_not_answer_is_not_ready(spark, tmp_path, postgres, monkeypatch):
    monkeypatch.setenv("SLUICE_DB_USER", USER)
    with pytest.raises(UpstreamNotReadyError) as refused:
        read(spark, tmp_path, postgres_source(postgres, url="jdbc:postgresql://127.0.0.1:1/x"))
    assert refused.value.exit_code == 4
