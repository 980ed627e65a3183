"""Versions that a catalogue gives; the formats themselves need jars that Spark does not bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from etl.sources.table_versions import read_table_version

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
"""Variable that names the jars (for the Spark that runs the tests), by commas; table; settings."""
CODE = """
import json
import sys
from pyspark.sql import SparkSession
from etl.sources.table_versions import read_table_version
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
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: the jars that read {name} tables, by commas")
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
        check=True,
        cwd=os.getcwd(),
    )
    created, written, same, again = done.stdout.split("\n")[-5:-1]
    assert all(version.startswith(f"{name}:") for version in (created, written, same, again))
    assert written == same
    assert len({created, written, again}) == 3
