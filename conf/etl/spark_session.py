"""The Spark session of a job: the section `spark` of a build."""

from __future__ import annotations

from pydantic import Field

from conf.config_base import Strict


class SparkConfig(Strict):
    """The Spark session, where the job starts one itself."""

    master: str = Field("local[*]", description="Master of the session.")
    driver_memory: str = Field("2g", description="Memory of the driver, as Spark writes it.")
    shuffle_partitions: int = Field(8, ge=1, description="Partitions of joins and aggregations.")
    event_log: str | None = Field(
        None,
        description="Folder or URI that Spark writes its event log to; None leaves that to Spark's "
        "own settings.",
    )
    conf: dict[str, str] = Field(
        default_factory=dict, description="Further settings of Spark, by name."
    )
