"""Settings of the session: ours, but for what its user has said."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from pyspark import SparkConf

from jobs.spark import java_options, set_fast_plans, set_java_locale

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def test_plans_are_fast_unless_the_user_says_else(spark):
    session = spark.newSession()
    session.conf.set(BYTES, "1000000")
    session.conf.unset("spark.sql.codegen.hugeMethodLimit")
    set_fast_plans(session, SparkConf(loadDefaults=False).set(BYTES, "1000000"))
    assert session.conf.get(BYTES) == "1000000"
    assert session.conf.get("spark.sql.codegen.hugeMethodLimit") == "8000"


def test_lists_are_handed_over_in_batches_of_rows_alone(spark):
    session = spark.newSession()
    session.conf.set(ROWS, "5000")
    frame = session.range(10_000, numPartitions=1).selectExpr("sequence(id, id + 49) as x")

    def sizes(given: SparkConf) -> list[int]:
        set_fast_plans(session, given)
        batches = frame.mapInArrow(
            lambda rows: (row.select([0]).slice(0, 1) for row in rows), frame.schema
        )
        return [batches.count()]

    session.conf.set(BYTES, "100000")
    assert sizes(SparkConf(loadDefaults=False).set(BYTES, "100000"))[0] > 10
    assert sizes(SparkConf(loadDefaults=False)) == [2]


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java on the path")
@pytest.mark.parametrize("given", ["", "-XX:+UseSerialGC", "-Dx=1 -XX:+UseG1GC"])
def test_java_starts_whatever_collector_the_environment_names(given, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", given)
    asked = ["java", *java_options(), "-XX:+PrintFlagsFinal", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    flags = {line.split()[1]: line.split()[3] for line in done.stdout.splitlines() if "Use" in line}
    wanted = given.rpartition("+")[2] or "UseParallelGC"
    assert flags[wanted] == "true"


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java on the path")
@pytest.mark.parametrize("given", ["C", "POSIX", "C.UTF-8"])
def test_java_reads_file_names_as_python_does(given, monkeypatch):
    monkeypatch.setenv("LC_ALL", given)
    set_java_locale()
    asked = ["java", "-XshowSettings:properties", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "sun.jnu.encoding = UTF-8" in done.stderr
