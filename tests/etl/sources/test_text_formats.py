"""Text formats: fields, patterns, JSON lines, libsvm, click sequences, values and their types."""

from __future__ import annotations

import csv
import datetime
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from etl.sources.bad_rows import check_columns, count_rows
from tests.etl.sources.inputs import INT, declare, outcomes, parse, read, write_lines

DAY = datetime.date(2024, 3, 1)
BAD = "not_timestamp:at"
DAY_MS = 1_709_251_200_000
LIST = {"name": "ids", "type": "list<int64>"}
TEXT = {"name": "text", "type": "string", "nullable": True}


def times(written: str | None, **options: object) -> dict[str, object]:
    return {"name": "at", "type": "timestamp", "timestamp_format": written, **options}


ZONES = {"": 0, "Z": 0, " UTC": 0, " GMT": 0, "+08:00": 8, " Europe/Berlin": 1, "+18:00": 18}
NO_ZONES = ["+99:99", "+18:01", "-19", "+05:60", "+530", "+0\u0661:00"]
NO_ZONES += [" CST", " BST", " EDT", "EST5EDT", " PM"]
NO_TIMES = ["12:30", "2024-13-01", "now", "2024-03-01T00:00+02:00"]
NO_TIMES += ["\u0662\u0660\u0662\u0664-03-01", "\u00a02024-03-01"]


@pytest.mark.parametrize(
    ("written", "texts", "expected"),
    [
        (None, ["2024-03-01", "2024-03-01T01:00:00.5+01:00"], [(DAY_MS,), (DAY_MS + 500,)]),
        (
            None,
            [f"2024-03-01T00:00:00{zone}" for zone in ZONES],
            [(DAY_MS - 3_600_000 * hours,) for hours in ZONES.values()],
        ),
        (None, [f"2024-03-01T00:00:00{zone}" for zone in NO_ZONES], [BAD] * len(NO_ZONES)),
        (None, NO_TIMES, [BAD] * len(NO_TIMES)),
        ("dd.MM.yyyy HH:mm", ["01.03.2024 00:01", "2024-03-01"], [(DAY_MS + 60_000,), BAD]),
        (
            "epoch_s",
            ["1709251200", str(2**63 - 1), "1.5", "1593878903.438", "1.709251200E9", "-0.0005"],
            [(DAY_MS,), BAD, (1500,), (1_593_878_903_438,), (DAY_MS,), (-1,)],
        ),
        ("epoch_s", ["1709251200.", "1_000", "\u0661.5", "0x1p3", "."], [(DAY_MS,), *[BAD] * 4]),
        ("epoch_ms", [f"{DAY_MS}.999", "-0.1", "1e30", "nan"], [(DAY_MS,), (-1,), BAD, BAD]),
        (
            "epoch_us",
            ["1709251200000999", "-1", "1709251200000999.9"],
            [(DAY_MS,), (-1,), (DAY_MS,)],
        ),
    ],
)
def test_times_are_read_as_milliseconds(spark, tmp_path, written, texts, expected):
    assert parse(spark, tmp_path, texts, times(written)) == expected


def test_the_future_is_after_the_run_not_after_the_clock(spark, tmp_path):
    write_lines(tmp_path, [str(DAY_MS + 86_399_999), str(DAY_MS + 86_400_000)])
    config = declare(times("epoch_ms", not_after="run_date"))
    source = read(spark, tmp_path, config, DateRange(DAY - datetime.timedelta(3), DAY))
    assert outcomes(source) == [(DAY_MS + 86_399_999,), "in_future:at"]
    with pytest.raises(ConfigError):
        read(spark, tmp_path, config)
    fixed = declare(times("epoch_ms", not_after="2024-03-02"))
    assert len(outcomes(read(spark, tmp_path, fixed))) == 2


@pytest.mark.parametrize("text", ["1_000", "\u0661", "\u00a01", "0x1p3", "1d", "1f", "2.d", " 5F "])
def test_text_that_is_no_number(spark, tmp_path, text):
    reals = {"name": "x", "type": "float32", "nullable": True}
    lists = {"name": "xs", "type": "list<float64>", "separator": ",", "nullable": True}
    lines = [f"{text}\t1\t1", f"1\t{text}\t1", f"1\t1\t1,{text}", " +1 \t +1. \t-.5E-1,7."]
    assert parse(spark, tmp_path, lines, INT, reals, lists) == [
        "not_int64:id",
        "not_float32:x",
        "not_list<float64>:xs",
        (1, 1.0, [-0.05, 7.0]),
    ]
    lines = [json.dumps({"id": 1, "xs": [text]})]
    in_json = parse(spark, tmp_path, lines, INT, {**lists, "separator": None}, format="json")
    assert in_json == ["not_list<float64>:xs"]


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


LIBSVM = {
    "+1 3:1 11:0.5  14:-2e-1 ": (1.0, [3, 11, 14], [1.0, 0.5, -0.20000000298023224]),
    "-1": (-1.0, [], []),
    "0 7:1 # a comment 9": (0.0, [7], [1.0]),
    "# a comment": "comment_line",
    "1 3:1 4": "malformed_pair",
    "1 3:1:2": "malformed_pair",
    "1 3: 4:1": "malformed_pair",
    "1 x:1": "not_list<int64>:indices",
    "1 -3:1": "below_minimum:indices",
    "1 3:x": "not_list<float32>:values",
    "1 3:inf": "not_finite:values",
    "1 3:5D": "not_list<float32>:values",
    "yes 3:1": "not_float32:label",
    "": "empty_line",
    "1 9223372036854775808:1": "not_list<int64>:indices",
    "1 9223372036854775807:1\r": (1.0, [2**63 - 1], [1.0]),
}


def test_sparse_lines_with_fields(spark, tmp_path):
    write_lines(tmp_path, ["1 0:3:1 2:11:0.5", "0 3:1"])
    source = read(spark, tmp_path, declare(format="libffm"))
    assert outcomes(source) == [(1.0, [0, 2], [3, 11], [1.0, 0.5]), "malformed_pair"]
    assert source.good.columns[:4] == ["label", "fields", "indices", "values"]


COLUMNS = [
    INT,
    {"name": "score", "type": "float32", "nullable": True},
    {"name": "user", "field": "who.user.id", "type": "string", "nullable": True},
    {"name": "tags", "type": "list<string>", "nullable": True},
]
JSON = {
    '{"id": 1, "score": 0.5, "who": {"user": {"id": "a"}}, "tags": ["x", "}{"]}': (
        (1, 0.5, "a", ["x", "}{"])
    ),
    '{"id": "2", "tags": null}': (2, None, None, None),
    '{"id": 3, "who": 7}': (3, None, None, None),
    '{"id": 4, "tags": "x"}': "not_list<string>:tags",
    '{"id": 5, "tags": ["x", null]}': "not_list<string>:tags",
    '{"id": 1.5}': "not_int64:id",
    '{"id": 9223372036854775808}': "not_int64:id",
    '{"id": true}': "not_int64:id",
    '{"score": 1}': "null:id",
    '{"id": 10': "malformed_json",
    '{"id": 11}{"id": 12}': "malformed_json",
    '{"id": 13} x': "malformed_json",
    '[{"id": 14}]': "malformed_json",
    "": "empty_line",
    "null": "malformed_json",
    '{"id": 15, "who": {"user": {"id": NaN}}}': "malformed_json",
    '{"id": 16, "tags": ["x", NaN]}': "malformed_json",
    '{"id": 17, "who": {"user": {"id": 1e400}}}': "malformed_json",
    '{"id": 18, "who": {"user": {"id": "1e400"}}, "score": 25e-2}': (18, 0.25, "1e400", None),
    # Half a character, which would become a question mark, and a whole one.
    r'{"id": 19, "tags": ["\ud800"]}': "malformed_json",
    r'{"id": 20, "tags": ["\udc00"]}': "malformed_json",
    r'{"id": 21, "tags": ["a\\\ud83d"]}': "malformed_json",
    r'{"id": 22, "tags": ["\ud83d\ude00", "\\ud800", "?"]}': (
        (22, None, None, ["\U0001f600", r"\ud800", "?"])
    ),
}


def test_new_keys_and_a_column_that_has_gone_empty_are_seen(spark, tmp_path, caplog):
    rows = [{"id": 1}, {"id": 2, "colour": "red"}, {"id": 3, "size": 4, "score": None}]
    write_lines(tmp_path, list(map(json.dumps, rows)))
    config = declare(*COLUMNS[:2], format="json", new_columns="fail")
    counts = count_rows(read(spark, tmp_path, config))
    assert (counts.read, counts.bad, counts.empty) == (3, {}, ("score",))
    with pytest.raises(InputDataError) as refused:
        check_columns("log", config, counts.new)
    assert "size" in str(refused.value)
    lenient = declare(*COLUMNS[:2], format="json", new_columns="ignore")
    counts = count_rows(read(spark, tmp_path, lenient))
    assert counts.new == ()
    check_columns("log", lenient, counts.new, counts.empty)
    assert "without a single value: score" in caplog.text


def test_a_key_with_dots_goes_before_a_path_of_the_same_name(spark, tmp_path):
    rows = [
        {"user.id": 1, "user": {"id": 2, "more.info": {"age": 3}}},
        {"user": {"id": 4, "more": {"info.age": 5}}},
        {"user.more": {"info": {"age": 6}}, "user.id": None},
        {"user.more.info.age": 7, "user": 8},
    ]
    write_lines(tmp_path, list(map(json.dumps, rows)))
    columns = [
        {"name": name, "type": "int64", "field": field, "nullable": True}
        for name, field in (("id", "user.id"), ("age", "user.more.info.age"))
    ]
    source = read(spark, tmp_path, declare(*columns, format="json", new_columns="fail"))
    assert outcomes(source) == [(1, 3), (4, 5), (None, 6), (None, 7)]
    assert not count_rows(source).new


CLICKS = {
    "name": "videos",
    "type": "list<int64>",
    "separator": " ",
    "pair": "channels",
    "pair_default": -1,
}
SEQUENCES = {
    "1\t12_3 7 12_4": (1, [12, 7, 12], [3, -1, 4]),
    "1\t5": (1, [5], [-1]),
    "1\t12__3": "malformed_entry:videos",
    "1\t_7": "missing_value:videos",
    "1\t": "null:videos",
    "1\t12_3  7": "empty_entry:videos",
    "1\t12_": "malformed_entry:videos",
    "1\t1_2_3": "malformed_entry:videos",
    "1\tx_1": "not_list<int64>:videos",
    "1\t1_x": "not_list<int64>:channels",
    "1\t12_3 ": "empty_entry:videos",
    "1\t_": "missing_value:videos",
    "1\t9223372036854775808_1": "not_list<int64>:videos",
}


JSON_SEQUENCES = {
    '{"id": 1, "videos": ["12_3", "7", 8]}': (1, [12, 7, 8], [3, -1, -1]),
    '{"id": 2, "videos": ["12_3", ""]}': "empty_entry:videos",
}
CLICK = {"name": "video", "type": "string", "pair": "channel", "pair_default": "none"}
ONE_CLICK = {
    "1\tv::1_news": (1, "v::1", "news"),
    "2\tv2": (2, "v2", "none"),
    "3\t": (3, None, None),
    "4\tv_": "malformed_entry:video",
    "5\t_news": "missing_value:video",
}
QUOTED = {
    '1,"a,b"': (1, "a,b"),
    '2,"say ""hi"""': (2, 'say "hi"'),
    '3,""': (3, ""),
    "4,": (4, None),
    '5,5" pipe': (5, '5" pipe'),
    '6,"open': "malformed_quotes",
    '7,"closed" late': "malformed_quotes",
    "8,a,b": "wrong_field_count",
    '"9",é': (9, "é"),
    # Longer than any stack.
    '10,"' + 200_000 * '""' + '"': (10, 200_000 * '"'),
}
ESCAPED = {
    r"1||'it\'s'": (1, "it's"),
    r"2||'a||b\\'": (2, "a||b\\"),
    "3||plain|": (3, "plain|"),
    r"4||'open\'": "malformed_quotes",
}
BY_NAME = {
    '"text",more,userId': "repeated_header",
    "\\N,x,1": (1, None),
    "NULL,x,2": (2, "NULL"),
    "a,x,\\N": "null:id",
    "a,x": "wrong_field_count",
}
GROUPS = {
    "(1,2)\t3\t4": (1, 2, [3, 4]),
    "(1;2)\t3": "pattern_mismatch",
    "(1,2)\t3\tx": "not_list<int64>:others",
}
NUMBERS = {
    "1\t0.5,1": (1, [0.5, 1.0]),
    "2\t0.5,-1": "below_minimum:w",
    "3\t0.5,nan": "not_finite:w",
    "4\t0.5,": "not_list<float32>:w",
    "9223372036854775808\t1": "not_int64:id",
    "-9223372036854775808\t1e39": "not_finite:w",
    "9223372036854775807\t2": (2**63 - 1, [2.0]),
}
QUERIES = {
    "2 qid:7 1:1 2:0.5": (2, 7, [1, 2], [1.0, 0.5]),
    "1 1:1": (1, None, [1], [1.0]),
    "0 qid:x 1:1": "not_int64:query",
    "2 qid:7 1:1 qid:8": "not_list<int64>:indices",
    "1 qid: 1:1": "not_int64:query",
}
QUERY_COLUMNS = [
    {"name": "clicked", "field": "label", "type": "int64"},
    {"name": "query", "field": "qid", "type": "int64", "nullable": True},
    {"name": "indices", "type": "list<int64>"},
    {"name": "values", "type": "list<float32>"},
]
EPOCHS = {
    '{"at": 1593878903.438}': (1_593_878_903_438,),
    '{"at": "1593878903.438"}': (1_593_878_903_438,),
    '{"at": 1593878903}': (1_593_878_903_000,),
}
BOUNDED = {
    # In the precision of the column.
    "1\t0.5\t": (1, 0.5, None),
    "2\t4.1\ta": (2, 4.099999904632568, "a"),
    "3\t4.11\ta": "above_maximum:score",
    "4\t0.09\ta": "below_minimum:score",
    "5\t0.1\tc": "not_allowed:kind",
}
SCORE = {"name": "score", "type": "float32", "minimum": 0.1, "maximum": 4.1}
KIND = {"name": "kind", "type": "string", "one_of": ["a", "b"]}
WEIGHTS = {"name": "w", "type": "list<float32>", "separator": ",", "minimum": 0}
PAIR = [INT, {**INT, "name": "item"}, {**LIST, "name": "others", "separator": "\t"}]
PATTERN = {"format": "pattern", "pattern": r"\((\d+),(\d+)\)\t(.*)"}
NAMED = {"format": "csv", "header": "by_name", "null_values": ["\\N"]}


@pytest.mark.parametrize(
    ("lines", "columns", "options"),
    [
        (LIBSVM, [], {"format": "libsvm"}),
        # Where no column takes the query's id it is passed over.
        ({"2 qid:7 1:1": (2.0, [1], [1.0])}, [], {"format": "libsvm"}),
        (QUERIES, QUERY_COLUMNS, {"format": "libsvm"}),
        (JSON, COLUMNS, {"format": "json"}),
        (EPOCHS, [times("epoch_s")], {"format": "json"}),
        (SEQUENCES, [INT, CLICKS], {}),
        (JSON_SEQUENCES, [INT, {**CLICKS, "separator": None}], {"format": "json"}),
        (ONE_CLICK, [INT, {**CLICK, "nullable": True}], {}),
        (QUOTED, [INT, TEXT], {"format": "csv"}),
        (ESCAPED, [INT, TEXT], {"separator": "||", "quote": "'", "escape": "\\"}),
        (BY_NAME, [{**INT, "field": "userId"}, TEXT], NAMED),
        (GROUPS, PAIR, PATTERN),
        (NUMBERS, [INT, WEIGHTS], {}),
        (BOUNDED, [INT, SCORE, {**KIND, "nullable": True}], {}),
    ],
)
def test_each_line_is_a_row_or_has_its_reason(spark, tmp_path, lines, columns, options):
    assert parse(spark, tmp_path, list(lines), *columns, **options) == list(lines.values())
