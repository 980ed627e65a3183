"""Source snapshots: unchanged inputs build nothing, changed ones build anew."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from conf.artefacts.dataset import DatasetPaths, published_versions
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.manifest import InputFile, InputTable
from etl.build import build_dataset
from etl.sources.snapshot import RunInputs, find_unwatched
from etl.sources.tables import checksum_rows, read_table_version
from etl.versions.publish import read_current
from etl.versions.run_fingerprint import RunRequest
from tests.etl.logs import build_config, write_logs
from tests.etl.sources.databases import connect_derby
from tests.etl.versions.test_runs import FEATURES

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
