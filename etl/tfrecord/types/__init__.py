"""The type mapping: Arrow columns to the features of a record and back; numpy and pyarrow alone."""
