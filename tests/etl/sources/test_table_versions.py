"""Versions that a catalogue gives; the formats themselves need jars that Spark does not bring."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from etl.sources.table_versions import read_table_version

JARS = "SLUICE_DELTA_JARS"


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
def test_a_delta_table_tells_each_change(tmp_path):
    """In a session of its own: its extension must be there when a session starts."""
    if not os.environ.get(JARS):
        pytest.skip(f"{JARS} is not set: the jars of delta-spark and delta-storage, by commas")
    code = """
import sys
from pyspark.sql import SparkSession
from etl.sources.table_versions import read_table_version
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.jars", sys.argv[1])
    .config("spark.ui.enabled", "false")
    .config("spark.sql.warehouse.dir", sys.argv[2])
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .getOrCreate()
)
versions = []
for change in (
    "CREATE TABLE clicks (id bigint) USING delta",
    "INSERT INTO clicks VALUES (1)",
    "SELECT 1",
    "DROP TABLE clicks",
    "CREATE TABLE clicks (id bigint) USING delta",
):
    spark.sql(change).collect()
    if not change.startswith("DROP"):
        versions.append(read_table_version(spark, "default.clicks"))
print("\\n".join(map(str, versions)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, os.environ[JARS], str(tmp_path / "tables")],
        capture_output=True,
        text=True,
        check=True,
        cwd=os.getcwd(),
    )
    created, written, same, again = done.stdout.split("\n")[-5:-1]
    assert all(version.startswith("delta:") for version in (created, written, same, again))
    assert written == same
    assert len({created, written, again}) == 3
