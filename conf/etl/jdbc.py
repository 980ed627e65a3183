"""Where a JDBC source stands, and who reads it; passwords are named, never written down."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from conf.etl.base import Strict

_ENVIRONMENT = r"^[A-Za-z_][A-Za-z0-9_]*$"
# `…//user:password@host`, `?password=…`, `;pwd=…`
_SECRET_IN_URL = re.compile(
    r"//[^/@]*:[^/@]*@|[?&;,(](user|password|passwd|pwd|secret|token)\w*=|:[^/@:]+/[^/@]+@",
    re.IGNORECASE,
)


class JdbcConfig(Strict):
    """A table or query of a database, read without writing.

    Credentials come from environment variables or a file when the build runs: the config, the
    manifest and the logs never hold them.
    """

    url: str = Field(pattern=r"^jdbc:[a-zA-Z0-9]+:")
    table: str | None = Field(None, description="Table, as SQL names it.")
    query: str | None = Field(None, description="SELECT to read instead of a table.")
    driver: str | None = Field(None, description="Driver class, where Spark cannot tell it.")
    user_env: str | None = Field(None, pattern=_ENVIRONMENT)
    password_env: str | None = Field(None, pattern=_ENVIRONMENT)
    password_file: str | None = Field(None, description="File whose first line is the password.")
    partition_column: str | None = Field(
        None, description="Whole-number, date or timestamp column that partitions are cut by."
    )
    partitions: int = Field(1, ge=1, le=1000, description="Connections that read at a time.")
    fetch_rows: int = Field(10_000, ge=1, description="Rows that one round trip brings.")

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str) -> str:
        if _SECRET_IN_URL.search(url):
            raise ValueError(
                "the URL holds credentials; take them out, and name user_env and password_env "
                "or password_file"
            )
        return url

    @model_validator(mode="after")
    def _consistent(self) -> JdbcConfig:
        if (self.table is None) == (self.query is None):
            raise ValueError("a jdbc source needs `table` or `query`, and only one of them")
        if self.password_env is not None and self.password_file is not None:
            raise ValueError("the password comes from `password_env` or `password_file`, not both")
        if self.partitions > 1 and self.partition_column is None:
            raise ValueError("`partitions` above 1 needs a `partition_column`")
        return self
