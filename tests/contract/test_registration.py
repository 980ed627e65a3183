"""Spark finds the formats by itself once the modules lie on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(5).write.format("tfrecord").mode("overwrite").save(sys.argv[1])
print(spark.read.format("sluice").load(sys.argv[1]).agg({"id": "sum"}).first()[0])
try:
    spark.range(5).write.partitionBy("id").format("tfrecord").mode("append").save(sys.argv[1])
except Exception as error:
    print("refused" if "partitioning" in str(error) else error)
"""


def test_both_modules_are_installed():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(config["tool"]["setuptools"]["py-modules"]) == {"pyspark_sluice", "pyspark_tfrecord"}


@pytest.mark.slow
def test_a_stock_session_writes_and_reads_without_a_line_of_ours(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["10", "refused"], done.stderr[-3000:]
