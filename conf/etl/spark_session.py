"""The Spark session of a job: the section `spark` of a build."""

from __future__ import annotations

from pydantic import Field, field_validator

from conf.config_base import Strict

_TIME_ZONE = "spark.sql.session.timeZone"


class SparkConfig(Strict):
    """The Spark session, where the job starts one itself."""

    master: str = Field("local[*]", description="Master of the session.")
    conf: dict[str, str] = Field(
        default_factory=dict,
        description="Settings of Spark by name, such as `spark.driver.memory` (2g if left out) or "
        "`spark.sql.shuffle.partitions`.",
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
