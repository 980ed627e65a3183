"""The type mapping: Arrow columns to the features of a record and back; numpy and pyarrow alone.

Spark's types become Arrow's in `spark/schema.py`; `to_example.py` takes lists, structs, maps and
vectors apart, `value_rules.py` has the rule of each type of value, and `codec/encode_columns.py`
the kind that stands on the wire.
"""
