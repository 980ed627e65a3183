"""Avro files as Apache Avro writes them, through Spark's Avro module, which is not part of Spark.

Without the module, `tests/etl/sources/test_frames.py` sees to it that the error says how to get it.
"""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.dataset import published_versions
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from etl.build import build_dataset
from etl.sources.bad_rows import check_bad_rows, count_rows
from etl.tfrecord.spark.failures import translate_failure
from tests.etl.logs import RATINGS, build_config, write_logs
from tests.etl.sources.inputs import INT, declare, good, outcomes, read, reasons

pytestmark = pytest.mark.skipif(
    not os.environ.get("SLUICE_AVRO_JAR"),
    reason="SLUICE_AVRO_JAR is not set: the jar of org.apache.spark:spark-avro_2.13",
)

RATING = [("user", "long"), ("item", "long"), ("rating", "int"), ("ts", "long")]


def write_avro(
    spark: Any, path: Path, fields: list[tuple[str, Any]], rows: list[tuple[Any, ...]]
) -> Path:
    """Writes a container file by Apache Avro's own library."""
    avro = spark._jvm.org.apache.avro
    record = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": name, "type": kind} for name, kind in fields],
    }
    parsed = getattr(avro, "Schema$Parser")().parse(json.dumps(record))
    writer = avro.file.DataFileWriter(avro.generic.GenericDatumWriter(parsed))
    writer.setCodec(avro.file.CodecFactory.deflateCodec(6))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.create(parsed, spark._jvm.java.io.File(str(path)))
    for row in rows:
        made = getattr(avro.generic, "GenericData$Record")(parsed)
        for (name, kind), value in zip(fields, row, strict=True):
            made.put(name, _to_java(spark, kind, value))
        writer.append(made)
    writer.close()
    return path


def _to_java(spark: Any, kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if kind == "long" or (isinstance(kind, dict) and kind["type"] == "long"):
        return spark._jvm.java.lang.Long(value)
    if kind == "float":
        return spark._jvm.java.lang.Float(value)
    if isinstance(kind, dict) and kind["type"] == "array":
        made = spark._jvm.java.util.ArrayList()
        for item in value:
            made.add(_to_java(spark, kind["items"], item))
        return made
    if isinstance(value, bytes):
        return spark._jvm.java.nio.ByteBuffer.wrap(bytearray(value))
    return value


def column(kind: str, name: str = "x", **options: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **options}


def test_types_of_avro_become_declared_types(spark, tmp_path):
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    fields = [
        ("id", "int"),
        ("title", ["null", "string"]),
        ("price", decimal),
        ("score", "float"),
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("tags", {"type": "array", "items": "string"}),
        ("seen", {"type": "array", "items": "long"}),
        ("raw", "bytes"),
        ("ok", "boolean"),
    ]
    price = int(Decimal("12.50") * 100).to_bytes(2, "big", signed=True)
    rows = [
        (1, "café", price, 1.5, 1_709_251_200_123, ["a", "b"], [2**40], b"x", True),
        (2, None, price, -1.5, 0, [], [], b"\xff", False),
    ]
    write_avro(spark, tmp_path / "in" / "a.avro", fields, rows)
    columns = [
        INT,
        column("string", "title", nullable=True),
        column("float64", "price"),
        column("float32", "score"),
        column("timestamp", "at"),
        column("list<string>", "tags"),
        column("list<int64>", "seen"),
        column("string", "raw"),
        column("int64", "ok"),
    ]
    source = read(spark, tmp_path, declare(*columns, format="avro"))
    expected = (1, "café", 12.5, 1.5, 1_709_251_200_123, ["a", "b"], [2**40], "x", 1)
    assert outcomes(source) == [expected, "not_utf8:raw"]


def test_schemas_may_change_from_file_to_file(spark, tmp_path):
    folder = tmp_path / "in"
    write_avro(spark, folder / "1.avro", [("id", "int")], [(1,), (2,)])
    write_avro(spark, folder / "2.avro", [("id", "string"), ("x", "string")], [("3", "a")])
    write_avro(spark, folder / "3.avro", [("id", "string"), ("x", "string")], [("no", "b")])
    columns = [INT, column("string", nullable=True)]
    source = read(spark, tmp_path, declare(*columns, format="avro"))
    assert outcomes(source) == [(1, None), (2, None), (3, "a"), "not_int64:id"]
    strict = read(spark, tmp_path, declare(INT, column("string"), format="avro"))
    assert reasons(strict) == ["null:x", "null:x", "not_int64:id"]
    with pytest.raises(InputDataError) as refused:
        read(spark, tmp_path, declare(INT, column("string", "title"), format="avro"))
    assert refused.value.exit_code == 3


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "another format":
        path.write_bytes(b"PAR1 and so on")
    elif kind == "cut short":
        path.write_bytes(content[:-20])
    else:  # bytes of a block
        path.write_bytes(content[:-30] + bytes(14) + content[-16:])


@pytest.mark.parametrize("kind", ["another format", "cut short", "spoilt block"])
def test_a_damaged_file_is_refused_whatever_the_share_of_bad_rows(spark, tmp_path, kind):
    rows = [(i,) for i in range(1000)]
    write_avro(spark, tmp_path / "in" / "a.avro", [("id", "long")], rows)
    damage(write_avro(spark, tmp_path / "in" / "b.avro", [("id", "long")], rows), kind)
    config = declare(INT, format="avro", max_bad_rows=1)
    with pytest.raises(Exception) as raised:
        count_rows(read(spark, tmp_path, config))
    found = raised.value
    if not isinstance(found, InputDataError):
        found = translate_failure(found)
    assert isinstance(found, InputDataError)
    assert "b.avro" in str(found)


def test_a_file_without_rows_is_no_trouble_and_one_without_a_byte_is_refused(spark, tmp_path):
    write_avro(spark, tmp_path / "in" / "a.avro", [("id", "long")], [(1,)])
    write_avro(spark, tmp_path / "in" / "b.avro", [("id", "long")], [])
    assert good(read(spark, tmp_path, declare(INT, format="avro"))) == [(1,)]
    (tmp_path / "in" / "c.avro").write_bytes(b"")
    with pytest.raises(InputDataError, match=r"c\.avro"):
        read(spark, tmp_path, declare(INT, format="avro"))


def avro_config(spark: Any, tmp_path: Path, rows: list[tuple[int, ...]], most: float = 0.5) -> Any:
    logs = write_logs(tmp_path / "logs")
    write_avro(spark, logs / "ratings.avro", RATING, rows)
    base = build_config(logs, tmp_path / "datasets").model_dump(exclude_unset=True)
    columns = [{"name": name, "type": "int64", "minimum": 0} for name, _ in RATING]
    base["sources"]["ratings"] = {
        "path": "ratings.avro",
        "format": "avro",
        "columns": columns,
        "max_bad_rows": most,
    }
    return BuildConfig.model_validate(base)


def test_a_build_of_avro_events_is_that_of_the_same_text(spark, tmp_path):
    rows = [tuple(map(int, line.split("::"))) for line in RATINGS]
    by_text = build_dataset(spark, build_config(write_logs(tmp_path / "t"), tmp_path / "text"))
    config = avro_config(spark, tmp_path, [*rows, (1, -5, 3, 7)])
    built = build_dataset(spark, config)
    assert built.manifest.counts.kept == by_text.manifest.counts.kept
    assert built.manifest.counts.quarantined["ratings"] == {"below_minimum:item": 1}
    (kept,) = (built.version / "quarantine" / "ratings").glob("part-*")
    assert json.loads(json.loads(kept.read_text())["line"])["item"] == -5
    shards = [shard.crc32c for shard in built.manifest.split("train").shards]
    assert shards == [shard.crc32c for shard in by_text.manifest.split("train").shards]
    # The same files once more: nothing to do.
    assert not build_dataset(spark, config).is_new
    failing = avro_config(spark, tmp_path / "f", [*rows, (1, -5, 3, 7)], 0)
    with pytest.raises(InputDataError):
        build_dataset(spark, failing)
    assert published_versions(tmp_path / "f" / "datasets" / "small") == []


def test_bad_rows_are_dropped_and_counted_within_their_budget(spark, tmp_path):
    write_avro(spark, tmp_path / "in" / "a.avro", [("id", "string")], [("1",), ("x",)])
    dropping = declare(INT, format="avro", max_bad_rows=0.5)
    source = read(spark, tmp_path, dropping)
    counts = count_rows(source)
    assert counts.bad == {"not_int64:id": 1}
    check_bad_rows(source, counts, dropping)
    strict = declare(INT, format="avro", max_bad_rows=0.1)
    with pytest.raises(InputDataError, match=r"50\.00%"):
        check_bad_rows(source, counts, strict)
