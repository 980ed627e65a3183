"""Delimited text: quotes and escapes as csv has them, nulls as Hive writes them."""

from __future__ import annotations

import csv
import io

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.etl.sources.inputs import INT, declare, outcomes, read

TEXT = {"name": "text", "type": "string", "nullable": True}


def test_quotes_hold_separators_and_doubled_quotes(spark, tmp_path):
    lines = [
        '1,"a,b"',
        '2,"say ""hi"""',
        '3,""',
        "4,",
        '5,5" pipe',
        '6,"open',
        '7,"closed" late',
        "8,a,b",
        '"9",é',
    ]
    (tmp_path / "in").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = read(spark, tmp_path, declare(INT, TEXT, format="csv"))
    assert outcomes(source) == [
        (1, "a,b"),
        (2, 'say "hi"'),
        (3, ""),
        (4, None),
        (5, '5" pipe'),
        "malformed_quotes",
        "malformed_quotes",
        "wrong_field_count",
        (9, "é"),
    ]


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), max_size=8),
        min_size=150,
        max_size=150,
    )
)
def test_what_a_csv_writer_writes_is_read_back(spark, tmp_path, texts):
    written = io.StringIO()
    writer = csv.writer(written, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows((i, text) for i, text in enumerate(texts))
    (tmp_path / "in").write_bytes(written.getvalue().encode())
    source = read(spark, tmp_path, declare(INT, TEXT, format="csv"))
    assert outcomes(source) == list(enumerate(texts))


def test_an_escape_and_a_separator_of_several_characters(spark, tmp_path):
    lines = [r"1||'it\'s'", r"2||'a||b\\'", "3||plain|", r"4||'open\'"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    config = declare(INT, TEXT, separator="||", quote="'", escape="\\")
    assert outcomes(read(spark, tmp_path, config)) == [
        (1, "it's"),
        (2, "a||b\\"),
        (3, "plain|"),
        "malformed_quotes",
    ]


def test_texts_that_mean_null_and_columns_by_name(spark, tmp_path):
    (tmp_path / "in").write_text('"text",more,userId\n\\N,x,1\nNULL,x,2\na,x,\\N\na,x\n')
    config = declare(
        {**INT, "field": "userId"}, TEXT, format="csv", header="by_name", null_values=["\\N"]
    )
    assert outcomes(read(spark, tmp_path, config)) == [
        "repeated_header",
        (1, None),
        (2, "NULL"),
        "null:id",
        "wrong_field_count",
    ]


def test_a_line_longer_than_any_stack_is_read(spark, tmp_path):
    quoted = '""' * 200_000
    (tmp_path / "in").write_text(f'1,"{quoted}"\n')
    ((_, text),) = outcomes(read(spark, tmp_path, declare(INT, TEXT, format="csv")))
    assert text == '"' * 200_000
