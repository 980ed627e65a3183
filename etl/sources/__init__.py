"""Declared sources: every row of a file, table or query is a row of the schema or a bad row."""
