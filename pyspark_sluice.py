"""Makes `format("sluice")` known to Spark, which imports top-level modules named `pyspark_…`.

The same as `tfrecord`, under a name that no JVM connector claims: Spark silently prefers a
connector on its class path.
"""

from etl.tfrecord.datasource import SluiceDataSource as DefaultSource

__all__ = ["DefaultSource"]
