"""Where and how shards are written, and the Spark session that writes them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from conf.etl.base import Strict


class OutputConfig(Strict):
    """Where and how the shards are written."""

    root: str = "work/datasets"
    shards: int = Field(8, ge=1, description="Shards of the train split.")
    eval_shards: int = Field(2, ge=1, description="Shards of each other split.")
    compression: Literal["gzip"] | None = None
    writer: Literal["native", "connector"] = Field(
        "native",
        description="`connector`: the shards are written by the JVM connector spark-tfrecord, "
        "which `spark.conf` must bring to the class path.",
    )
    seed: int = Field(0, description="Salt of the content hash that orders the records.")


class SparkConfig(Strict):
    """The Spark session, where the job starts one itself."""

    master: str = "local[*]"
    driver_memory: str = "2g"
    shuffle_partitions: int = Field(8, ge=1)
    conf: dict[str, str] = Field(default_factory=dict)
