"""Text files: headers, encodings, and nothing lost with them."""

from __future__ import annotations

import bz2
import gzip
import logging
from pathlib import Path
from typing import Any

import pytest

from conf.errors import InputDataError
from etl.sources.bad_rows import count_rows
from etl.sources.source import Source
from etl.sources.text_files import header_names
from tests.etl.sources.inputs import INT, declare, good, outcomes
from tests.etl.sources.inputs import read as read_declared

COLUMNS = [INT, {"name": "kind", "type": "string"}]
TEXT = {"name": "text", "type": "string"}


def read(spark, folder: Path, **changes: Any) -> Source:
    options = {"path": "d", "separator": ",", "columns": COLUMNS, "header": True, **changes}
    return read_declared(spark, folder, declare(**options))


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / "d").mkdir(exist_ok=True)
    (folder / "d" / name).write_bytes(content)


def test_first_lines_are_taken_out_and_later_ones_equal_to_them_are_bad_rows(spark, tmp_path):
    write(tmp_path, "a.csv", b"id,kind\n1,x\nid,kind\n2,y\nid,kind\n")
    write(tmp_path, "b.csv", b"kind,id\ny,3\n")  # Names of columns may have any order.
    write(tmp_path, "c.csv", b"id,kind\nid,kind\nbroken\n")
    write(tmp_path, "d.csv", b"")
    source = read(spark, tmp_path)
    assert good(source) == [(1, "x"), (2, "y"), (3, "y")]
    counts = count_rows(source)
    assert (counts.read, counts.bad) == (7, {"repeated_header": 3, "wrong_field_count": 1})
    bad = sorted((Path(r["file"]).name, r["line"], r["reason"]) for r in source.bad.collect())
    repeated = ("id,kind", "repeated_header")
    broken = ("c.csv", "broken", "wrong_field_count")
    assert bad == [("a.csv", *repeated), ("a.csv", *repeated), broken, ("c.csv", *repeated)]


def test_a_header_may_have_any_names(spark, tmp_path):
    """Also those that look like data: no other line goes with it uncounted."""
    write(tmp_path, "a.csv", b"1,x\n2,y\n1,x\n")
    write(tmp_path, "b.csv", b"1,x\n3,z\n")
    source = read(spark, tmp_path)
    assert good(source) == [(2, "y"), (3, "z")]
    assert count_rows(source).bad == {"repeated_header": 1}


def test_line_ends_byte_order_mark_and_compression(spark, tmp_path):
    write(tmp_path, "a.csv", b"\xef\xbb\xbfid,kind\r\n1,x\r\n")
    write(tmp_path, "b.csv", b"id,kind\r2,x\r")
    write(tmp_path, "c.csv.gz", gzip.compress(b"id,kind\n3,x\n"))
    write(tmp_path, "d.csv.bz2", bz2.compress(b"id,kind\n4,x\n"))
    write(tmp_path, "e.csv", b"id,kind")
    source = read(spark, tmp_path)
    assert good(source) == [(i, "x") for i in range(1, 5)]
    assert count_rows(source).bad == {}


TOO_LONG = b"x" * (2 << 20)


@pytest.mark.parametrize(
    ("header", "contents"),
    [
        (True, [b"id\n1,x\n"]),
        (True, [b"id,kind,more\n1,x\n"]),
        (True, [b"\n1,x\n"]),
        (True, [TOO_LONG]),
        (True, [b"user,type\n1,x\n", b"type,user\nx,1\n"]),
        ("by_name", [b"id,more\n1,x\n", b"id,id,more\n1,2,3\n"]),
        ("by_name", [b"id,kind\n1,x\n", b"1,x\n"]),
        ("by_name", [b"id,more\n1,x\n", b"id,sort\n1,x\n"]),
    ],
)
def test_headers_that_cannot_be_meant_are_refused(spark, tmp_path, header, contents):
    for number, content in enumerate(contents):
        write(tmp_path, f"{number}.csv", content)
    with pytest.raises(InputDataError):
        read(spark, tmp_path, header=header)


@pytest.mark.parametrize(
    ("options", "header", "names"),
    [
        ({}, b'"id, the first",kind', ("id, the first", "kind")),
        ({}, b'"say ""id""",kind', ('say "id"', "kind")),
        ({"escape": "\\"}, b'"say \\"id\\",",kind', ('say "id",', "kind")),
        ({"format": "delimited", "separator": "::", "quote": '"'}, b'"id"::kind', ("id", "kind")),
        ({"format": "delimited", "separator": ","}, b'"id,x"', ('"id', 'x"')),
        ({}, b"", ("",)),
    ],
)
def test_a_header_is_taken_apart_as_the_lines_below_it_are(options, header, names):
    config = declare(*COLUMNS, **{"format": "csv", "header": True, **options})
    assert header_names(config, header) == names


def test_by_name_each_file_has_the_columns_of_its_own_header(spark, tmp_path, caplog):
    write(tmp_path, "a.csv", b"id,kind\n1,x\n2,y\n")
    write(tmp_path, "b.csv", b"kind,more,id\nz,7,3\nkind,more,id\nid,kind\n")
    write(tmp_path, "c.csv", b"id\n4\n")
    write(tmp_path, "d.csv", b"id,kind\n5,w\n")
    columns = [COLUMNS[0], {**COLUMNS[1], "nullable": True}]
    with caplog.at_level(logging.WARNING, "sluice.sources"):
        source = read(spark, tmp_path, header="by_name", columns=columns)
    assert "not declared: more" in caplog.text
    assert good(source) == [(1, "x"), (2, "y"), (3, "z"), (4, None), (5, "w")]
    counts = count_rows(source)
    # A header is one only in the files that begin with it.
    assert (counts.read, counts.bad) == (7, {"repeated_header": 1, "wrong_field_count": 1})
    assert count_rows(read(spark, tmp_path, header="by_name")).bad["null:kind"] == 1
    with pytest.raises(InputDataError):
        read(spark, tmp_path, header="by_name", columns=columns, new_columns="fail")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "windows-1251"])
def test_lines_of_utf16_and_blocks_that_a_crash_left_are_bad_rows(spark, tmp_path, encoding):
    lines = ["1,a\n2,b\n".encode("utf-16-le"), b"\n3,c\n\0\0\0\0 4,d\n5,e\0\0\n"]
    write(tmp_path, "a", b"".join(lines))
    found = outcomes(read(spark, tmp_path, header=False, encoding=encoding))
    assert found == ["nul_byte", "nul_byte", "nul_byte", (3, "c"), "nul_byte", "nul_byte"]


@pytest.mark.parametrize(
    ("encoding", "text", "unknown"),
    [
        ("windows-1251", "привет", b"\x98"),
        ("gb18030", "视频 栏目", b"\xff"),
        ("shift_jis", "動画ソ", b"\xff"),
        ("us-ascii", "plain", b"\xe9"),
        ("utf-8", "é", b"\xe9"),
    ],
)
def test_each_encoding_is_read_and_its_unknown_bytes_are_not(
    spark, tmp_path, encoding, text, unknown
):
    write(tmp_path, "a", text.encode(encoding) + b"\n" + unknown + b"\n")
    source = read(spark, tmp_path, header=False, columns=[TEXT], encoding=encoding)
    assert outcomes(source) == [(text,), f"not_{encoding.replace('utf-', 'utf')}"]
    assert spark.conf.get("spark.sql.legacy.javaCharsets") == "false"


def test_bytes_of_latin_1_are_letters_whatever_they_are(spark, tmp_path):
    write(tmp_path, "a", "é\n".encode() + b"\xe9\n")
    latin = read(spark, tmp_path, header=False, columns=[TEXT], encoding="latin-1")
    assert outcomes(latin) == [("Ã©",), ("é",)]
