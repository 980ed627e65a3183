"""Makes `format("tfrecords")` known to Spark, which imports top-level modules named `pyspark_…`.

The name and the options of spark-tensorflow-connector, so that its users change no line.
"""

from pyspark_tfrecord import find_source

DefaultSource = find_source("TFRecordsDataSource", "tfrecords")
