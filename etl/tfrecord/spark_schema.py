import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
def to_arrow_schema(schema):
    fields = []
    for field in schema.fields:
        try:
            arrow_type = to_arrow_type(field.dataType)
        except Exception:
            arrow_type = pa.null()
        fields.append(pa.field(field.name, arrow_type))
    return pa.schema(fields)
