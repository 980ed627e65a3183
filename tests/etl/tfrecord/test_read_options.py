"""Options of a read."""

from __future__ import annotations

import pytest

from conf.errors import ConfigError
from etl.tfrecord.read_options import parse_read_options


def parse(**options: str):
    return parse_read_options({"path": "/x", **options})


def test_defaults() -> None:
    options = parse()
    assert options.paths == ("/x",)
    assert (options.on_corrupt, options.split_bytes, options.infer_records) == (
        "fail", 128 << 20, 10_000
    )  # fmt: skip
    assert options.record_type is None


def test_names_and_values_in_any_case() -> None:
    options = parse(
        oncorrupt="SKIP", SPLITBYTES="5", inferrecords="ALL", recursivefilelookup="True"
    )
    assert (options.on_corrupt, options.split_bytes, options.infer_records) == ("skip", 5, None)
    assert options.is_recursive


def test_several_paths() -> None:
    assert parse_read_options({"paths": '["/a", "file:///b"]'}).paths == ("/a", "/b")
    for bad in ("[]", "[1]", "/a", "{}"):
        with pytest.raises(ConfigError):
            parse_read_options({"paths": bad})


def test_where_lists_values_as_text() -> None:
    where = parse(where='{"date": ["2026-01-01", null], "hour": [1], "flag": [true]}').where
    assert where == {"date": ("2026-01-01", None), "hour": ("1",), "flag": ("true",)}
    for bad in ("x", "[]", '{"date": "2026-01-01"}'):
        with pytest.raises(ConfigError, match="where"):
            parse(where=bad)


@pytest.mark.parametrize("name", ["splitBytes", "minPartitions", "inferRecords"])
@pytest.mark.parametrize("value", ["0", "-1", "x", ""])
def test_counts_are_positive(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse(**{name: value})


def test_quarantine_is_complete_and_outside() -> None:
    options = parse(onCorrupt="quarantine", quarantinePath="/q")
    assert options.quarantine == "/q"
    for bad in (
        {"onCorrupt": "quarantine"}, {"quarantinePath": "/q"},
        {"onCorrupt": "quarantine", "quarantinePath": "/x/q"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="quarantine"):
            parse(**bad)


def test_what_would_lose_data_silently_is_refused() -> None:
    with pytest.raises(ConfigError, match="onCorrupt=skip"):
        parse(ignoreCorruptFiles="true")
    with pytest.raises(ConfigError, match="did you mean 'onCorrupt'"):
        parse(onCorupt="skip")


def test_lowering_options_pass() -> None:
    assert parse(timestamps="ms").lowering == {"timestamps": "ms"}
