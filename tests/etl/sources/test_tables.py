"""Tables by name and by JDBC: days, parts, credentials; and whether inputs have changed."""

from __future__ import annotations

import datetime
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pyspark.sql import functions as F

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.etl.build import BuildConfig
from conf.manifest import InputFile, InputTable
from etl.build import build_dataset
from etl.sources.snapshot import RunInputs, find_unwatched
from etl.sources.tables import checksum_rows, read_table_version
from etl.versions.publish import read_current
from etl.versions.run_fingerprint import RunRequest
from jobs.support.spark_session import java_options
from tests.etl.logs import build_config, write_logs
from tests.etl.sources.databases import (
    USER,
    Postgres,
    PostgresUnavailableError,
    connect_derby,
    driver_jar,
    start_postgres,
)
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, reasons
from tests.etl.versions.test_runs import FEATURES

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


SCHEMA = "a int, b int, s string, l array<int>, m map<string,int>, t struct<x:int,y:string>"


def test_order_and_partitions_do_not_count_repeated_rows_do(spark):
    frame = spark.range(50).select("id", F.col("id").cast("string").alias("text"))
    made = checksum_rows(frame)
    assert checksum_rows(frame.repartition(7).orderBy(F.desc("id"))) == made
    assert checksum_rows(frame.unionAll(frame)) != made
    # Two equal rows do not cancel out.
    twice = spark.createDataFrame([(1, "x"), (1, "x")], frame.schema)
    assert checksum_rows(frame.limit(0)) != checksum_rows(twice)


@pytest.mark.exhaustive
def test_rows_that_differ_in_one_place_have_another_checksum(spark):
    row = {"a": 1, "b": 1, "s": "x", "l": [1, 2], "m": {"k": 1}, "t": (1, "y")}
    others = {
        "a": [None],
        "b": [None],
        "s": [None, "", "null"],
        "l": [None, [], [None, 1], [1, None], [1]],
        "m": [None, {"k": 2}],
        "t": [None, (None, "y"), (1, "z")],
    }
    rows = [row, *({**row, name: value} for name, values in others.items() for value in values)]
    made = {checksum_rows(spark.createDataFrame([tuple(r.values())], SCHEMA)) for r in rows}
    assert len(made) == len(rows) == 16


def test_sums_of_many_hashes_do_not_overflow(spark):
    same = spark.range(1000).select(F.lit(1).alias("a"))
    one = int(checksum_rows(same.limit(1)).split(":")[1], 16)
    assert checksum_rows(same) == f"1000:{one * 1000 % 2**64:016x}"


FORMATS = {
    "delta": (
        "SLUICE_DELTA_JARS",
        "default.clicks",
        {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        },
    ),
    "iceberg": (
        "SLUICE_ICEBERG_JARS",
        "lake.default.clicks",
        {
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
        },
    ),
}
"""Variable that names the jars, by commas; table; settings."""
CODE = """
import json
import sys
from pyspark.sql import SparkSession
from etl.sources.tables import read_table_version
format, table, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
builder = SparkSession.builder.master("local[1]")
for key, value in settings.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
create = f"CREATE TABLE {table} (id bigint) USING {format}"
versions = []
insert, drop = f"INSERT INTO {table} VALUES (1)", f"DROP TABLE {table}"
for change in (create, insert, "SELECT 1", drop, create):
    spark.sql(change).collect()
    if not change.startswith("DROP"):
        versions.append(read_table_version(spark, table))
print("\\n".join(map(str, versions)))
"""


def test_views_and_tables_of_other_formats_have_none(spark):
    spark.range(3).createOrReplaceTempView("sluice_view")
    assert read_table_version(spark, "sluice_view") is None
    spark.sql("CREATE OR REPLACE TEMP VIEW sluice_odd AS SELECT 'delta' AS Provider")
    assert read_table_version(spark, "sluice_odd") is None
    assert read_table_version(spark, "no.such.table") is None
    assert read_table_version(spark, "no such name; DROP") is None
    spark.sql("CREATE TABLE sluice_plain (`Provider` string) USING parquet")
    try:
        assert read_table_version(spark, "default.sluice_plain") is None
    finally:
        spark.sql("DROP TABLE sluice_plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_table_with_versions_tells_each_change(tmp_path, name):
    """In a session of its own: its extension must be there when a session starts."""
    variable, table, settings = FORMATS[name]
    packages = os.environ.get("SLUICE_LAKE_SPARK")
    if not os.environ.get(variable) or not packages:
        pytest.skip(
            f"{variable} is not set, the jars that read {name} tables, by commas, or "
            "SLUICE_LAKE_SPARK, a folder that has the PySpark that they are for"
        )
    settings = settings | {
        "spark.jars": os.environ[variable],
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(tmp_path / "tables"),
        "spark.sql.catalog.lake.warehouse": str(tmp_path / "lake"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, table, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.getcwd(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([packages, os.getcwd()])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    created, written, same, again = done.stdout.split("\n")[-5:-1]
    assert all(version.startswith(f"{name}:") for version in (created, written, same, again))
    assert written == same
    assert len({created, written, again}) == 3


DATABASE = "jdbc:derby:memory:sluice_inputs;create=true"


@pytest.fixture
def statement(spark) -> Iterator[Any]:
    """A database with a dictionary of users, and a statement to change it by."""
    with connect_derby(spark, DATABASE) as statement:
        statement.execute("CREATE TABLE USERS (ID BIGINT, GENDER VARCHAR(9), SEEN INT)")
        statement.execute("INSERT INTO USERS VALUES (1, 'F', 0), (2, 'M', 0), (3, NULL, 0)")
        yield statement
        statement.execute("DROP TABLE USERS")


def configure(tmp_path: Path, **source: Any) -> BuildConfig:
    logs = write_logs(tmp_path / "logs")
    base = build_config(logs, tmp_path / "datasets", label=None).model_dump(exclude_unset=True)
    users = {
        "key": "user",
        "columns": [
            {"name": "user", "field": "ID", "type": "int64"},
            {"name": "gender", "type": "string", "nullable": True},
        ],
        "new_columns": "ignore",
    }
    base["sources"]["users"] = {**users, **source}
    gender = {"name": "gender", "column": "gender", "role": "user"}
    return BuildConfig.model_validate({**base, "features": [*FEATURES, gender]})


@pytest.mark.exhaustive
def test_a_dictionary_in_a_database_is_watched(spark, tmp_path, statement, caplog):
    jdbc = {"url": DATABASE, "dbtable": "USERS"}
    config = configure(tmp_path, format="jdbc", jdbc=jdbc)
    first = build_dataset(spark, config)
    (table,) = first.manifest.source.tables
    assert table.place == f"{DATABASE} USERS"
    assert not build_dataset(spark, config).is_new
    # What the source does not declare is nothing to it; nor is the order of the rows.
    statement.execute("UPDATE USERS SET SEEN = 1")
    statement.execute("DELETE FROM USERS WHERE ID = 1")
    statement.execute("INSERT INTO USERS VALUES (1, 'F', 2)")
    assert not build_dataset(spark, config).is_new
    statement.execute("UPDATE USERS SET GENDER = 'M' WHERE ID = 1")
    second = build_dataset(spark, config)
    assert second.is_new
    assert second.manifest.source.tables[0].state != table.state
    statement.execute("UPDATE USERS SET GENDER = 'F' WHERE ID = 1")
    assert build_dataset(spark, config).version == first.version
    # What nothing tells of is built anew each time.
    blind = configure(tmp_path, format="jdbc", jdbc=jdbc, change_check=None)
    assert build_dataset(spark, blind).manifest.source.tables[0].state is None
    with caplog.at_level(logging.INFO, "sluice.build"):
        assert build_dataset(spark, blind).is_new
    assert "nothing tells whether users changed" in caplog.text

    def change() -> dict[str, int]:
        statement.execute("INSERT INTO USERS VALUES (4, 'F', 0)")
        return {}

    published = published_versions(tmp_path / "datasets" / "small")
    with pytest.raises(InputDataError):  # It changed while it was read.
        build_dataset(spark, config, change, RunRequest(force=True))
    assert published_versions(tmp_path / "datasets" / "small") == published


@pytest.mark.exhaustive
def test_a_table_is_watched_and_one_that_was_dropped_leaves_the_version(spark, tmp_path):
    config = configure(tmp_path, format="table", table="sluice_users")
    frame = spark.createDataFrame([(1, "F"), (2, "M"), (3, None)], "id bigint, gender string")
    frame.write.mode("overwrite").saveAsTable("sluice_users")
    first = build_dataset(spark, config)
    assert not build_dataset(spark, config).is_new
    # Written by another process, past this session.
    location = spark.sql("DESCRIBE TABLE EXTENDED sluice_users").where("col_name = 'Location'")
    folder = location.first()["data_type"]
    spark.createDataFrame([(4, "M")], "id bigint, gender string").write.mode("append").parquet(
        folder
    )
    second = build_dataset(spark, config)
    assert second.is_new
    assert second.manifest.counts.read["users"] == first.manifest.counts.read["users"] + 1
    spark.sql("DROP TABLE sluice_users")
    with pytest.raises(InputDataError):
        build_dataset(spark, config)
    paths = DatasetPaths(tmp_path / "datasets", "small")
    assert read_current(paths) == second.manifest.dataset_version


def test_files_without_times_and_tables_without_states_are_unwatched():
    file = InputFile("log", "/r", 10, 5)
    assert find_unwatched(RunInputs((file,), (InputTable("t", "t", "rows:1"),))) == []
    blind = RunInputs((InputFile("log", "/r", 10, 0),), (InputTable("t", "t", None),))
    assert find_unwatched(blind) == ["log", "t"]
