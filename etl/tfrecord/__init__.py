"""The wire: Arrow batches to standard TFRecord files and back, and Spark's `format("tfrecord")`.

Needs numpy, numba and pyarrow; PySpark only in `datasource` and in `etl.tfrecord.spark`.
"""
