"""`write_tfrecords`: a DataFrame to TFRecord shards, with all that Spark's own writer lacks."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from conf.errors import ConfigError, did_you_mean
from etl.failures import translate_failure
from etl.tfrecord.committed import Committed
from etl.tfrecord.datasource import SluiceDataSource, register_tfrecord
from etl.tfrecord.options import SAVE_MODES, parse_write_options
from etl.tfrecord.publishing.committer import build_committer
from etl.tfrecord.publishing.modes import SaveMode
from etl.tfrecord.spark.arrangement import arrange_rows
from etl.tfrecord.spark.columns import describe_columns
from etl.tfrecord.spark.schema import to_arrow_schema
from etl.tfrecord.unknown_columns import refuse_unknown
from etl.tfrecord.write_config import WriteConfig
from etl.tfrecord.write_plan import WritePlan, plan_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OVERWRITE_MODE = "spark.sql.sources.partitionOverwriteMode"


def write_tfrecords(
    frame: DataFrame,
    path: str | Path,
    *,
    mode: str = "errorifexists",
    config: WriteConfig | None = None,
    **settings: Any,
) -> Committed:
    """Writes a DataFrame as TFRecord shards with a manifest.

    Args:
        frame: The rows.
        path: Output directory: a local path or `file:` URI that driver and executors share, or
            an `s3://`, `s3a://` or `gs://` URI.
        mode: `append`, `overwrite`, `errorifexists` (or `error`), or `ignore`.
        config: How to write; the defaults if None.
        **settings: Fields of `WriteConfig` that take precedence over `config`.

    Returns:
        The directory's manifest after the write.

    Raises:
        ConfigError: Bad settings, columns that the wire cannot carry (all named), or output that
            the mode protects; nothing was touched.
        InputDataError: A value that the wire or a policy refuses; earlier output is untouched.
        UpstreamNotReadyError: Another job published meanwhile what this one would replace.
    """
    spark = frame.sparkSession
    config = _resolve(spark, config or WriteConfig(), settings)
    plan = _plan(frame, str(path), _parse_mode(mode), config)
    committer = build_committer(plan.options)
    holds_output = committer.check_mode(plan.options.mode)  # refuses early what it protects
    if plan.options.mode == "ignore" and holds_output:
        return committer.read() or plan.job.description
    register_tfrecord(spark)
    spark_mode = "overwrite" if plan.options.mode == "overwrite" else "append"
    options = config.to_options(str(path), plan.options.mode, plan.job.job_id)
    try:
        writer = arrange_rows(frame, config).write.format(SluiceDataSource.name())
        writer.mode(spark_mode).options(**options).save()
    except PySparkException as error:
        cause = translate_failure(error)
        if cause is None:
            raise
        raise cause from error
    return committer.read() or plan.job.description


def _parse_mode(mode: str) -> SaveMode:
    if mode.lower() not in SAVE_MODES:
        raise ConfigError(
            "unknown save mode",
            received=repr(mode),
            allowed=", ".join(SAVE_MODES),
            fix=did_you_mean(mode, SAVE_MODES),
        )
    return SAVE_MODES[mode.lower()]


def _resolve(spark: SparkSession, config: WriteConfig, settings: dict[str, Any]) -> WriteConfig:
    unknown = [name for name in settings if name not in WriteConfig.__dataclass_fields__]
    refuse_unknown("unknown setting(s)", unknown, WriteConfig.__dataclass_fields__)
    config = replace(config, **settings)
    if config.replace_partitions is None:
        dynamic = str(spark.conf.get(_OVERWRITE_MODE, "static")).lower() == "dynamic"
        config = replace(config, replace_partitions=dynamic)
    return config


def _plan(frame: DataFrame, path: str, mode: SaveMode, config: WriteConfig) -> WritePlan:
    given = config.to_options(path, mode, uuid.uuid4().hex)
    options = parse_write_options(given, mode == "overwrite")
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    columns = describe_columns(frame.schema, options)
    return plan_write(to_arrow_schema(frame.schema), options, types, columns)
