"""The Spark session of a job: the section `spark` of a build."""

from __future__ import annotations

from pydantic import Field, field_validator

from conf.config_base import Strict

_TIME_ZONE = "spark.sql.session.timeZone"


class SparkConfig(Strict):
    """The Spark session, where the job starts one itself."""

    master: str = Field("local[*]", description="Master of the session.")
    driver_memory: str = Field("2g", description="Memory of the driver, as Spark writes it.")
    shuffle_partitions: int | None = Field(
        None,
        ge=1,
        description="Partitions of joins and aggregations; None: those of the session, and where "
        "it sets none, 8 on one machine, on a cluster one for 64 MB of input, from 8 to 200.",
    )
    vocabulary_bytes: int = Field(
        256 << 20,
        ge=1,
        description="Bytes of tokens up to which each Python worker holds a vocabulary: a number "
        "has 8, a text 4 and its own. Those of a larger one become ids by a join in Spark.",
    )
    event_log: str | None = Field(
        None,
        description="Folder or URI that Spark writes its event log to; None leaves that to Spark's "
        "own settings.",
    )
    conf: dict[str, str] = Field(
        default_factory=dict, description="Further settings of Spark, by name."
    )

    @field_validator("conf")
    @classmethod
    def _no_time_zone(cls, conf: dict[str, str]) -> dict[str, str]:
        """Times of a log without a zone are UTC on every machine."""
        if _TIME_ZONE in conf:
            raise ValueError(
                f"{_TIME_ZONE} is always UTC; times of another zone are read by the "
                "`timestamp_format` of their column, with a zone in the text"
            )
        return conf
