"""`python -m tests.bench.large_vocabulary`: memory of a build whose vocabulary no worker holds.

Each event has a token of its own, which a list of tokens names again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from etl.build import build_dataset
from jobs.support.spark_session import build_session
from tests.bench.clock import PeakMemory

EVENTS_PER_LIST = 1000
VOCABULARY: dict[str, Any] = {"kind": "vocabulary", "name": "token"}


def build_config(folder: Path, spark: dict[str, Any]) -> BuildConfig:
    """A build of one vocabulary, of a column and of a list."""
    columns = [("token", "string"), ("tokens", "list<string>"), ("ts", "int64")]
    return BuildConfig.model_validate({
        "name": "large",
        "data_dir": str(folder),
        "sources": {"log": {
            "path": "log", "format": "parquet",
            "columns": [{"name": name, "type": kind} for name, kind in columns],
        }},
        "events": {"source": "log", "time": "ts"},
        "split": {"strategy": "temporal"},
        "features": [
            {"name": "token", "column": "token", "role": "user", "encoding": VOCABULARY},
            {"name": "tokens", "column": "tokens", "role": "user", "encoding": VOCABULARY},
        ],
        "output": {"root": str(folder / "out"), "shards": 8},
        "spark": spark,
    })  # fmt: skip


def measure(tokens: int, folder: Path, spark_config: dict[str, Any]) -> dict[str, Any]:
    """Writes a log of so many tokens, builds it, and returns peaks of memory in bytes."""
    config = build_config(folder, spark_config)
    spark = build_session(config.spark, "bench large vocabulary")
    token = F.concat(F.lit("token-"), F.hex(F.xxhash64("id"))).alias("token")
    near = F.pmod(F.col("id"), F.lit(EVENTS_PER_LIST))
    other = F.concat(F.lit("token-"), F.hex(F.xxhash64(near)))
    log = spark.range(tokens).select(
        token, F.array(token, other).alias("tokens"), (F.lit(1_700_000_000) + near).alias("ts")
    )
    log.write.parquet((folder / "log").as_uri())
    with PeakMemory() as peak:
        result = build_dataset(spark, config)
    sizes = {spec.name: spec.vocabulary_size for spec in result.manifest.schema.features}
    return {"peak_rss_bytes": peak.bytes, "vocabulary_sizes": sizes}


def main() -> None:
    """Measures a build, and prints the peaks as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--vocabulary-bytes", type=int, default=256 << 20)
    parser.add_argument("--driver-memory", default="4g")
    given = parser.parse_args()
    spark = {
        "master": "local[2]",
        "driver": {"memory": given.driver_memory},
        "sluice.vocabularyBytes": given.vocabulary_bytes,
    }
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(given.tokens, Path(folder).resolve(), spark), indent=1))


if __name__ == "__main__":
    main()
