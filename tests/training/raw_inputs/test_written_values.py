"""Raw values as the log writes them: times, lists and pairs in one text, decimals and booleans."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.errors import InputDataError
from training.encoders.source import SourceFacts
from training.raw_inputs.files import RawFile
from training.raw_inputs.inputs import InputColumn, find_forms, parse_time
from training.raw_inputs.requests import RawValueError, read_names
from training.serving.tensors import parse_predict

NULL = -(2**61)
MOMENT = datetime.datetime(2026, 1, 31, 10, 30)
MOMENT_MS = 1_769_855_400_000
COLUMNS = [
    {"name": "at", "type": "timestamp"},
    {"name": "day", "type": "timestamp", "timestamp_format": "dd.MM.yyyy"},
    {"name": "sent", "type": "timestamp", "timestamp_format": "epoch_s"},
    {"name": "price", "type": "float32"},
    {"name": "flag", "type": "string"},
    {"name": "videos", "type": "list<int64>", "separator": " ",
     "pair": "channels", "pair_default": 0},
    {"name": "tags", "type": "list<string>", "separator": ";"},
    {"name": "seen_at", "type": "int64"},
]  # fmt: skip
CONFIG = {
    "events": {"source": "log", "history": "videos", "history_order": "oldest_first", "time": "at"},
    "sources": {"log": {"columns": COLUMNS}},
}


SCALARS = [
    ("hour", "at", "int64", NULL), ("day", "day", "int64", NULL), ("sent", "sent", "int64", NULL),
    ("price", "price", "float32", None), ("flag", "flag", "string", "<null>"),
    ("late", "seen_at", "int64", NULL),
]  # fmt: skip
LISTS = [("videos", "int64", -1), ("channels", "int64", -1), ("tags", "string", "<pad>")]


def build_inputs() -> list[InputColumn]:
    """An input of each column; `hour` is made of `at`, and `late` of seconds."""
    facts = SourceFacts(None, find_forms({**CONFIG, "joins": []}))
    made = [InputColumn(name, name, column, dtype, False, None, None, None, null)
            for name, column, dtype, null in SCALARS]  # fmt: skip
    made += [InputColumn(n, n, n, dtype, True, None, 9, pad, None) for n, dtype, pad in LISTS]
    return [facts.complete(item, "s" if item.name == "late" else None) for item in made]


WRITTEN: dict[str, Any] = {
    "at": "2026-01-31T10:30:00Z", "day": "2026-01-31", "sent": MOMENT_MS // 1000, "price": 1.5,
    "flag": "true", "videos": "12_3 7 12_4", "tags": "a;b", "seen_at": "2026-01-31 10:30:00",
}  # fmt: skip
"""A row as the log writes it."""
READ: dict[str, Any] = {
    "hour": MOMENT_MS, "day": 1_769_817_600_000, "sent": MOMENT_MS, "price": 1.5, "flag": b"true",
    "videos": [12, 7, 12], "channels": [4, 0, 3], "tags": [b"a", b"b"], "late": MOMENT_MS // 1000,
}  # fmt: skip
Row = dict[str, Any]
Read = Callable[[Path, list[Row]], dict[str, np.ndarray]]


def read_file(path: Path, rows: list[Row]) -> dict[str, np.ndarray]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".csv":
        texts = {n: [None if r.get(n) is None else str(r[n]) for r in rows] for n in names}
        pa_csv.write_csv(pa.table({n: pa.array(t, pa.string()) for n, t in texts.items()}), path)
    elif path.suffix == ".jsonl":
        # A byte order mark is no part of the first line.
        path.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        rows = [{name: row.get(name) for name in names} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), path)
    [found] = RawFile(path).read(build_inputs(), 100)
    return found.inputs


def ask_server(rows: list[Row], *, as_columns: bool = False) -> dict[str, np.ndarray]:
    inputs = build_inputs()
    names = read_names(json.loads(json.dumps([item.to_json() for item in inputs])))
    types = {"int64": tf.int64, "float32": tf.float32, "string": tf.string}
    specs = {
        item.name: tf.TensorSpec([None, None] if item.is_list else [None], types[item.dtype])
        for item in inputs
    }
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    body = {"inputs": columns} if as_columns else {"instances": rows}
    return parse_predict(body, specs, names)[0]


READERS: dict[str, Read] = {
    **{kind: (lambda folder, rows, kind=kind: read_file(folder / f"rows.{kind}", rows))
       for kind in ("csv", "jsonl", "parquet")},
    "server": lambda _, rows: ask_server(rows),
}  # fmt: skip


def check_first(found: dict[str, np.ndarray], names: Iterable[str] = tuple(READ)) -> None:
    for name in names:
        np.testing.assert_array_equal(found[name][0], READ[name], err_msg=name)


@pytest.mark.parametrize("reader", list(READERS))
def test_a_row_of_the_log_is_read_alike_everywhere(tmp_path: Path, reader: str) -> None:
    shorter = {**WRITTEN, "videos": "5", "tags": "c"}
    found = READERS[reader](tmp_path, [WRITTEN, shorter])
    check_first(found)
    assert found["videos"][1].tolist() == [5, -1, -1]
    assert found["channels"][1].tolist() == [0, -1, -1]
    if reader != "csv":  # Lists are lists, with the latest first.
        lists = {"videos": [12, 7, 12], "channels": [4, 0, 3], "tags": ["a", "b"]}
        check_first(READERS[reader](tmp_path, [{**WRITTEN, **lists}]))


def test_types_of_the_source_are_those_of_the_build(tmp_path: Path) -> None:
    """Timestamps and dates of Parquet, decimals, booleans, and epochs as numbers."""
    zone = datetime.timezone(datetime.timedelta(hours=2))
    row = {
        **WRITTEN,
        "at": MOMENT.replace(tzinfo=datetime.UTC).astimezone(zone), "day": MOMENT.date(),
        "sent": MOMENT, "price": decimal.Decimal("1.50"), "flag": True, "seen_at": MOMENT,
    }  # fmt: skip
    found = read_file(tmp_path / "rows.parquet", [row])
    check_first(found)
    numbers = {**WRITTEN, "at": MOMENT_MS, "day": READ["day"], "sent": MOMENT_MS,
               "seen_at": MOMENT_MS // 1000}  # fmt: skip
    for reader in READERS.values():
        check_first(reader(tmp_path, [numbers]), ("hour", "day", "sent", "late"))
    assert ask_server([{**WRITTEN, "flag": True}])["flag"][0] == b"true"


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("at", "31.01.2026", "ISO 8601"),
        ("day", "31.01.2026", "ISO 8601"),
        ("seen_at", "31.01.2026", "a whole number of seconds"),
        ("videos", "12_3  7", "entries 'value_second' between ' ', the latest last"),
        ("videos", "12_3_4", "as the build reads it"),
        ("videos", "_3", "as the build reads it"),
        *(("videos", f"12 {text}", "as the build reads it")
          for text in ("x", "\u0661", "\u00a01", "1.0x", "0x1p3", "1d", "nan")),
    ],
)  # fmt: skip
def test_what_the_build_was_not_told_of_is_refused(
    tmp_path: Path, reader: str, column: str, value: Any, said: str
) -> None:
    with pytest.raises((InputDataError, RawValueError)) as caught:
        READERS[reader](tmp_path, [WRITTEN, {**WRITTEN, column: value}])
    assert said in str(caught.value)
    assert repr(value) in str(caught.value)
    if reader != "server":
        assert "row 2" in str(caught.value)


@pytest.mark.parametrize("reader", ["jsonl", "server"])
def test_second_values_need_the_text_that_holds_them(tmp_path: Path, reader: str) -> None:
    with pytest.raises((InputDataError, RawValueError), match="text of entries"):
        READERS[reader](tmp_path, [{**WRITTEN, "videos": [12, 7]}])


OWN, TEXT = {**WRITTEN, "channels": [9, 8, 7]}, WRITTEN


@pytest.mark.parametrize("reader", ["jsonl", "parquet", "server"])
@pytest.mark.parametrize(
    "rows",
    [[TEXT, OWN], [{**TEXT, "channels": None}, OWN, TEXT], [OWN, OWN]],
)
def test_a_row_has_its_second_values_whatever_the_others_hold(
    tmp_path: Path, reader: str, rows: list[Row]
) -> None:
    found = READERS[reader](tmp_path, rows)
    wanted = [[9, 8, 7] if row is OWN else READ["channels"] for row in rows]
    assert found["channels"].tolist() == wanted
    assert found["videos"].tolist() == [READ["videos"]] * len(rows)
    if reader == "server":
        assert ask_server(rows, as_columns=True)["channels"].tolist() == wanted


def test_a_name_that_a_row_lacks_does_not_hide_its_other_one(tmp_path: Path) -> None:
    """A line has `hour`, the input, another one `at`, its column; a third one both."""
    other = {"hour": WRITTEN["at"], **{n: v for n, v in WRITTEN.items() if n != "at"}}
    rows = [WRITTEN, other, {**WRITTEN, **other}]
    for reader in ("jsonl", "server"):
        found = READERS[reader](tmp_path, rows)
        assert found["hour"].tolist() == [MOMENT_MS] * 3
    both = {**WRITTEN, "hour": "2026-01-31T10:31:00Z"}
    with pytest.raises(InputDataError, match="row 2: column 'hour' is made of 'at'"):
        read_file(tmp_path / "rows.jsonl", [other, both])


def test_a_separator_of_one_s_own_goes_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = {**WRITTEN, "videos": "12|7|12", "channels": "4|0|3", "tags": "a|b"}
    pa_csv.write_csv(pa.table({name: [str(value)] for name, value in row.items()}), path)
    [found] = RawFile(path, list_separator="|").read(build_inputs(), 9)
    check_first(found.inputs, ("videos", "channels", "tags"))


ZONES = ("+99:99", "+18:01", "-19", "+05:60", "+530", "+0\u0661:00")
NO_DATES = (*(f"2026-01-31T10:30:00{zone}" for zone in ZONES), "10:30", "31.01.2026",
            "2026-01-31T10:30+02:00", "\u0662\u0660\u0662\u0666-01-31", "\u00a02026-01-31",
            "2026-02-30", "")  # fmt: skip
NO_NUMBERS = ("1_000", "\u0661", "1e999999999", "-1e999999999", "nan", "0x1", "1d", ".")


@pytest.mark.parametrize(
    ("text", "epochs", "expected"),
    [
        ("2026-01-31", None, MOMENT_MS - 37_800_000),
        ("2026-1-31 10:30", None, MOMENT_MS),
        ("2026-01-31T12:30:00.123456+02:00", None, MOMENT_MS + 123),
        ("1969-12-31T23:59:59.9999", None, -1),
        (str(MOMENT_MS), None, MOMENT_MS),
        ("5.0", None, 5),
        ("2026-01-31T10:30:00+18:00", None, MOMENT_MS - 64_800_000),
        ("1769855400.438", "s", MOMENT_MS + 438),
        (" 1.769855400438E9", "s", MOMENT_MS + 438),
        ("1769855400438.9", "ms", MOMENT_MS + 438),
        ("1769855400438999.9", "us", MOMENT_MS + 438),
        (f"{MOMENT_MS}.5", "s", MOMENT_MS),
        ("-0.5", "ms", -1),
        ("1e-999999999", "s", 0),
        *((text, None, None) for text in NO_DATES), *((text, "s", None) for text in NO_NUMBERS),
    ],
)  # fmt: skip
def test_times_as_logs_write_them(text: str, epochs: str | None, expected: int | None) -> None:
    if expected is not None:
        assert parse_time(text, epochs, "ms") == expected
        return
    with pytest.raises(ValueError, match=r"is no (time|zone|number)|out of range|must be in"):
        parse_time(text, epochs, "ms")


@pytest.mark.parametrize("reader", list(READERS))
def test_fractions_of_epochs_are_rounded_down(tmp_path: Path, reader: str) -> None:
    values: list[Any] = [1769855400.438, "1769855400.438"]
    if reader in ("csv", "parquet"):  # JSON has no decimals.
        values.append(decimal.Decimal("1769855400.4389"))
    for value in values:
        found = READERS[reader](tmp_path, [{**WRITTEN, "sent": value}] * 2)
        assert found["sent"].tolist() == [MOMENT_MS + 438] * 2
