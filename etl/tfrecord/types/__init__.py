"""The type mapping: Arrow columns to the features of a record and back; numpy and pyarrow alone.

Spark's types become Arrow's in `spark/schema.py`; `to_example.py` takes lists, structs, maps and
vectors apart, `column_policies.py` holds what a user chose for a column, `conversion_rules.py`
the rule of each type of value that follows, `conversions.py` what carries a rule out on values and
lists, and `codec/encode_columns.py` the kind that stands on the wire.
"""
