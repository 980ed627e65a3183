"""Spark's side of the wire: arranging, writing, planning reads, and reading."""
