"""Makes `format("sluice")` known to Spark, which imports top-level modules named `pyspark_…`.

The same as `tfrecord`, under a name that no JVM connector claims: Spark silently prefers a
connector on its class path.
"""

from pyspark_tfrecord import find_source

DefaultSource = find_source("SluiceDataSource", "sluice")
