"""Spark's side of the format: schemas, planning, tasks; nothing else here imports PySpark."""
