"""JSON lines: values as they are written, told from those that do not fit or are not there."""

from __future__ import annotations

import json

import pytest

from conf.errors import InputDataError
from etl.sources import check_columns, count_rows
from tests.etl.sources.inputs import INT, declare, outcomes, read

COLUMNS = [
    INT,
    {"name": "score", "type": "float32", "nullable": True},
    {"name": "user", "field": "who.user.id", "type": "string", "nullable": True},
    {"name": "tags", "type": "list<string>", "nullable": True},
]


def test_each_line_is_a_row_or_has_its_reason(spark, tmp_path):
    lines = [
        '{"id": 1, "score": 0.5, "who": {"user": {"id": "a"}}, "tags": ["x", "}{"]}',
        '{"id": "2", "tags": null}',
        '{"id": 3, "who": 7}',
        '{"id": 4, "tags": "x"}',
        '{"id": 5, "tags": ["x", null]}',
        '{"id": 1.5}',
        '{"id": 9223372036854775808}',
        '{"id": true}',
        '{"score": 1}',
        '{"id": 10',
        '{"id": 11}{"id": 12}',
        '{"id": 13} x',
        '[{"id": 14}]',
        "",
        "null",
    ]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    assert outcomes(read(spark, tmp_path, declare(*COLUMNS, format="json"))) == [
        (1, 0.5, "a", ["x", "}{"]),
        (2, None, None, None),
        (3, None, None, None),
        "not_list<string>:tags",
        "not_list<string>:tags",
        "not_int64:id",
        "not_int64:id",
        "not_int64:id",
        "null:id",
        "malformed_json",
        "malformed_json",
        "malformed_json",
        "malformed_json",
        "empty_line",
        "malformed_json",
    ]


def test_new_keys_and_a_column_that_has_gone_empty_are_seen(spark, tmp_path):
    rows = [{"id": 1}, {"id": 2, "colour": "red"}, {"id": 3, "size": 4, "score": None}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = declare(*COLUMNS[:2], format="json", new_columns="fail")
    counts = count_rows(read(spark, tmp_path, config))
    assert (counts.read, counts.bad, counts.values) == (3, {}, {"score": 0})
    with pytest.raises(InputDataError, match="not declared") as refused:
        check_columns("log", config, counts)
    assert "size" in str(refused.value)
    lenient = declare(*COLUMNS[:2], format="json", new_columns="ignore", all_null_columns="fail")
    counts = count_rows(read(spark, tmp_path, lenient))
    assert counts.new == ()
    with pytest.raises(InputDataError, match="without a single value"):
        check_columns("log", lenient, counts)
