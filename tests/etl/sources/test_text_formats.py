"""Text formats: delimited fields, JSON lines, libsvm, click sequences, values and their types."""

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
from tests.etl.sources.inputs import INT, declare, outcomes, read

DAY = datetime.date(2024, 3, 1)
BAD = "not_timestamp:at"
DAY_MS = 1_709_251_200_000


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
    (tmp_path / "in").write_text("\n".join(texts) + "\n")
    assert outcomes(read(spark, tmp_path, declare(times(written)))) == expected


def test_the_future_is_after_the_run_not_after_the_clock(spark, tmp_path):
    (tmp_path / "in").write_text(f"{DAY_MS + 86_399_999}\n{DAY_MS + 86_400_000}\n")
    config = declare(times("epoch_ms", not_after="run_date"))
    source = read(spark, tmp_path, config, DateRange(DAY - datetime.timedelta(3), DAY))
    assert outcomes(source) == [(DAY_MS + 86_399_999,), "in_future:at"]
    with pytest.raises(ConfigError):
        read(spark, tmp_path, config)
    fixed = declare(times("epoch_ms", not_after="2024-03-02"))
    assert len(outcomes(read(spark, tmp_path, fixed))) == 2


def test_lists_of_floats_bounds_in_lists_and_ids_beyond_int64(spark, tmp_path):
    weights = {"name": "w", "type": "list<float32>", "separator": ",", "minimum": 0}
    lines = ["1\t0.5,1", "2\t0.5,-1", "3\t0.5,nan", "4\t0.5,", "9223372036854775808\t1"]
    lines += ["-9223372036854775808\t1e39", "9223372036854775807\t2"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    assert outcomes(read(spark, tmp_path, declare(INT, weights))) == [
        (1, [0.5, 1.0]),
        "below_minimum:w",
        "not_finite:w",
        "not_list<float32>:w",
        "not_int64:id",
        "not_finite:w",
        (2**63 - 1, [2.0]),
    ]


@pytest.mark.parametrize("text", ["1_000", "\u0661", "\u00a01", "0x1p3", "1d", "1f", "2.d", " 5F "])
def test_text_that_is_no_number(spark, tmp_path, text):
    reals = {"name": "x", "type": "float32", "nullable": True}
    lists = {"name": "xs", "type": "list<float64>", "separator": ",", "nullable": True}
    write(tmp_path, f"{text}\t1\t1", f"1\t{text}\t1", f"1\t1\t1,{text}", " +1 \t +1. \t-.5E-1,7.")
    assert outcomes(read(spark, tmp_path, declare(INT, reals, lists))) == [
        "not_int64:id",
        "not_float32:x",
        "not_list<float64>:xs",
        (1, 1.0, [-0.05, 7.0]),
    ]
    write(tmp_path, json.dumps({"id": 1, "xs": [text]}))
    in_json = read(spark, tmp_path, declare(INT, {**lists, "separator": None}, format="json"))
    assert outcomes(in_json) == ["not_list<float64>:xs"]


def test_epochs_of_json_may_have_fractions(spark, tmp_path):
    rows = [{"at": 1593878903.438}, {"at": "1593878903.438"}, {"at": 1593878903}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)) + "\n")
    source = read(spark, tmp_path, declare(times("epoch_s"), format="json"))
    moment = 1_593_878_903_438
    assert outcomes(source) == [(moment,), (moment,), (moment - 438,)]


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
        (1, "it's"), (2, "a||b\\"), (3, "plain|"), "malformed_quotes",
    ]  # fmt: skip


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


def write(folder, *lines):
    (folder / "in").write_text("\n".join(lines) + "\n")


def test_libsvm_lines_and_their_faults(spark, tmp_path):
    write(
        tmp_path,
        "+1 3:1 11:0.5  14:-2e-1 ",
        "-1",
        "0 7:1 # a comment 9",
        "1 3:1 4",
        "1 3:1:2",
        "1 3: 4:1",
        "1 x:1",
        "1 -3:1",
        "1 3:x",
        "1 3:inf",
        "1 3:5D",
        "yes 3:1",
        "",
        "1 9223372036854775808:1",
        "1 9223372036854775807:1\r",
    )
    assert outcomes(read(spark, tmp_path, declare(format="libsvm"))) == [
        (1.0, [3, 11, 14], [1.0, 0.5, -0.20000000298023224]),
        (-1.0, [], []),
        (0.0, [7], [1.0]),
        "malformed_pair",
        "malformed_pair",
        "malformed_pair",
        "not_list<int64>:indices",
        "below_minimum:indices",
        "not_list<float32>:values",
        "not_finite:values",
        "not_list<float32>:values",
        "not_float32:label",
        "empty_line",
        "not_list<int64>:indices",
        (1.0, [2**63 - 1], [1.0]),
    ]


def test_libffm_has_fields(spark, tmp_path):
    write(tmp_path, "1 0:3:1 2:11:0.5", "0 3:1")
    source = read(spark, tmp_path, declare(format="libffm"))
    assert outcomes(source) == [(1.0, [0, 2], [3, 11], [1.0, 0.5]), "malformed_pair"]
    assert source.good.columns[:4] == ["label", "fields", "indices", "values"]


def test_query_ids_are_read_where_they_are_declared_and_passed_over_else(spark, tmp_path):
    write(tmp_path, "2 qid:7 1:1 2:0.5", "1 1:1", "0 qid:x 1:1", "2 qid:7 1:1 qid:8")
    columns = [
        {"name": "clicked", "field": "label", "type": "int64"},
        {"name": "query", "field": "qid", "type": "int64", "nullable": True},
        {"name": "indices", "type": "list<int64>"},
        {"name": "values", "type": "list<float32>"},
    ]
    source = read(spark, tmp_path, declare(*columns, format="libsvm"))
    assert outcomes(source) == [
        (2, 7, [1, 2], [1.0, 0.5]),
        (1, None, [1], [1.0]),
        "not_int64:query",
        "not_list<int64>:indices",
    ]
    plain = read(spark, tmp_path, declare(format="libsvm"))
    assert outcomes(plain)[:2] == [(2.0, [1, 2], [1.0, 0.5]), (1.0, [1], [1.0])]


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
        '{"id": 15, "who": {"user": {"id": NaN}}}',
        '{"id": 16, "tags": ["x", NaN]}',
        '{"id": 17, "who": {"user": {"id": 1e400}}}',
        '{"id": 18, "who": {"user": {"id": "1e400"}}, "score": 25e-2}',
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
        "malformed_json",
        "malformed_json",
        "malformed_json",
        (18, 0.25, "1e400", None),
    ]


def test_half_a_character_makes_a_bad_row(spark, tmp_path):
    texts = [r"\ud800", r"\udc00", r"a\\\ud83d", r"\ud83d\ude00", r"\\ud800", "?"]
    (tmp_path / "in").write_text("".join(f'{{"name": "{text}"}}\n' for text in texts))
    config = declare({"name": "name", "type": "string"}, format="json")
    found = outcomes(read(spark, tmp_path, config))
    good_rows = [("\U0001f600",), (r"\ud800",), ("?",)]
    assert sorted(map(str, found)) == sorted(map(str, [*good_rows, *["malformed_json"] * 3]))


def test_new_keys_and_a_column_that_has_gone_empty_are_seen(spark, tmp_path, caplog):
    rows = [{"id": 1}, {"id": 2, "colour": "red"}, {"id": 3, "size": 4, "score": None}]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = declare(*COLUMNS[:2], format="json", new_columns="fail")
    counts = count_rows(read(spark, tmp_path, config))
    assert (counts.read, counts.bad, counts.values) == (3, {}, {"score": 0})
    with pytest.raises(InputDataError) as refused:
        check_columns("log", config, counts)
    assert "size" in str(refused.value)
    lenient = declare(*COLUMNS[:2], format="json", new_columns="ignore")
    counts = count_rows(read(spark, tmp_path, lenient))
    assert counts.new == ()
    check_columns("log", lenient, counts)
    assert "without a single value: score" in caplog.text


CLICKS = {
    "name": "videos",
    "type": "list<int64>",
    "separator": " ",
    "pair": "channels",
    "pair_default": -1,
}


def test_sequences_give_two_aligned_lists(spark, tmp_path):
    lines = ["1\t12_3 7 12_4", "2\t5", "3\t12__3", "4\t_7", "5\t", "6\t12_3  7", "7\t12_"]
    lines += ["8\t1_2_3", "9\tx_1", "10\t1_x", "11\t12_3 ", "12\t_", "13\t9223372036854775808_1"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    source = read(spark, tmp_path, declare(INT, CLICKS))
    assert outcomes(source) == [
        (1, [12, 7, 12], [3, -1, 4]),
        (2, [5], [-1]),
        "malformed_entry:videos",
        "missing_value:videos",
        "null:videos",
        "empty_entry:videos",
        "malformed_entry:videos",
        "malformed_entry:videos",
        "not_list<int64>:videos",
        "not_list<int64>:channels",
        "empty_entry:videos",
        "missing_value:videos",
        "not_list<int64>:videos",
    ]


def test_one_click_gives_two_columns_and_its_name_is_free(spark, tmp_path):
    pair = {"pair": "channel", "pair_default": "none"}
    video = {"name": "video", "type": "string", **pair, "nullable": True}
    (tmp_path / "in").write_text("1\tv::1_news\n2\tv2\n3\t\n4\tv_\n5\t_news\n")
    config = declare(INT, video)
    assert config.column_types == {"id": "int64", "video": "string", "channel": "string"}
    assert outcomes(read(spark, tmp_path, config)) == [
        (1, "v::1", "news"),
        (2, "v2", "none"),
        (3, None, None),
        "malformed_entry:video",
        "missing_value:video",
    ]


def test_sequences_inside_json(spark, tmp_path):
    clicks = {**CLICKS, "separator": None}
    lines = ['{"id": 1, "videos": ["12_3", "7", 8]}', '{"id": 2, "videos": ["12_3", ""]}']
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    source = read(spark, tmp_path, declare(INT, clicks, format="json"))
    assert outcomes(source) == [(1, [12, 7, 8], [3, -1, -1]), "empty_entry:videos"]


def test_a_key_with_dots_goes_before_a_path_of_the_same_name(spark, tmp_path):
    rows = [
        {"user.id": 1, "user": {"id": 2, "more.info": {"age": 3}}},
        {"user": {"id": 4, "more": {"info.age": 5}}},
        {"user.more": {"info": {"age": 6}}, "user.id": None},
        {"user.more.info.age": 7, "user": 8},
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, rows)) + "\n")
    columns = [
        {"name": name, "type": "int64", "field": field, "nullable": True}
        for name, field in (("id", "user.id"), ("age", "user.more.info.age"))
    ]
    config = declare(*columns, format="json", new_columns="fail")
    source = read(spark, tmp_path, config)
    assert outcomes(source) == [(1, 3), (4, 5), (None, 6), (None, 7)]
    assert not count_rows(source).new
