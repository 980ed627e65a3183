"""Makes `format("tfrecord")` known to Spark, which imports top-level modules named `pyspark_…`."""

from etl.tfrecord.datasource import TFRecordDataSource as DefaultSource

__all__ = ["DefaultSource"]
