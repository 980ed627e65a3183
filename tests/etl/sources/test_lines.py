"""Encodings: bytes that an encoding does not know make a bad row, not a failed task."""

from __future__ import annotations

import pytest

from tests.etl.sources.inputs import declare, outcomes, read

TEXT = {"name": "text", "type": "string"}


@pytest.mark.parametrize(
    ("encoding", "text", "unknown"),
    [
        ("windows-1251", "привет", b"\x98"),
        ("gb18030", "视频 栏目", b"\xff"),
        ("shift_jis", "動画ソ", b"\xff"),
        ("us-ascii", "plain", b"\xe9"),
    ],
)
def test_each_encoding_is_read_and_its_unknown_bytes_are_not(
    spark, tmp_path, encoding, text, unknown
):
    (tmp_path / "in").write_bytes(text.encode(encoding) + b"\n" + unknown + b"\n")
    source = read(spark, tmp_path, declare(TEXT, encoding=encoding))
    assert outcomes(source) == [(text,), f"not_{encoding}"]
    assert spark.conf.get("spark.sql.legacy.javaCharsets") == "false"
