"""The type mapping: Arrow columns to the features of a record and back; numpy and pyarrow alone.

Spark's types become Arrow's in `spark/schema.py`; `to_example.py` takes structs, maps and vectors
apart, `values.py` converts what the encoder does not take, and `from_example.py` is the way back.
"""
