"""What we write the JVM connector reads as the same DataFrame, and the other way round.

Needs the connector: its jar in SLUICE_CONNECTOR_JAR, or a Maven that Spark can resolve it from.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.artefacts.dataset import read_manifest
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.types.features import RECORD_TYPES, WireFeature
from tests.bench.tfrecord.peers import CONNECTOR_JAR_VARIABLE
from tests.contract.connector_session import ConnectorSession, ConnectorUnavailableError
from tests.etl.built_versions import without_raw
from tests.etl.logs import build_config, write_logs
from tests.tfrecord_files import read_file

pytestmark = pytest.mark.exhaustive

GZIP = "org.apache.hadoop.io.compress.GzipCodec"
HAS_SEQUENCES = "SequenceExample" in RECORD_TYPES
INT64 = (-(2**63), 2**63 - 1)
INT32 = (-(2**31), 2**31 - 1)
# All types that the connector supports, but decimals: it scales them wrongly.
SCHEMA = (
    "row int, i int, l long, f float, d double, s string, b binary, ints array<int>, "
    "longs array<long>, floats array<float>, doubles array<double>, strings array<string>, "
    "blobs array<binary>"
)
ROWS: list[tuple[Any, ...]] = [
    (0, 1, 2, 0.5, 0.25, "text", b"\x00\xff", [1], [2], [0.5], [0.25], ["a"], [b"\x00"]),
    (1, *[None] * 12),
    (2, INT32[0], INT64[0], -math.inf, math.inf, "", b"", [], [], [], [], [], []),
    (3, INT32[1], INT64[1], 2.0**-149, 3.4028234663852886e38, "grüße 漢字 🎉", bytes(range(256)),
     list(INT32), list(INT64), [math.inf, -0.0], [2.0**-149, -math.inf], ["", "ü"], [b"", b"\xff"]),
    (4, 0, 0, 0.0, -0.0, "x" * 100_000, b"y" * 70_000, list(range(500)), list(range(500)),
     [0.5] * 500, [0.25] * 500, ["z"] * 500, [b"z"] * 500),
]  # fmt: skip


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectorSession]:
    with ExitStack() as stack:
        log = tmp_path_factory.mktemp("connector") / "stderr.log"
        try:
            session = stack.enter_context(ConnectorSession(log))
        except ConnectorUnavailableError as error:
            pytest.skip(str(error))
        yield session


def collect(frame: Any) -> list[dict[str, Any]]:
    return sorted((row.asDict(True) for row in frame.collect()), key=lambda row: str(row))


def write_ours(frame: Any, records: Path, **options: str) -> None:
    frame.write.format("tfrecord").options(**options).mode("overwrite").save(str(records))


def read_theirs(
    connector: ConnectorSession, spark: Any, records: Path, schema: Any, **options: str
) -> Any:
    table = records.with_name(f"{records.name}.read.parquet")
    connector.call(
        "read", records=str(records), table=str(table), options=options,
        schema=None if schema is None else schema.jsonValue(),
    )  # fmt: skip
    return spark.read.parquet(str(table))


def write_theirs(connector: ConnectorSession, frame: Any, records: Path, **options: str) -> None:
    table = records.with_name(f"{records.name}.write.parquet")
    frame.write.mode("overwrite").parquet(str(table))
    connector.call("write", table=str(table), records=str(records), options=options)


@pytest.fixture
def frame(spark):
    return spark.createDataFrame(ROWS, SCHEMA).repartition(2)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, GZIP])
def test_connector_reads_our_examples_as_the_same_frame(connector, spark, frame, tmp_path, codec):
    options = {} if codec is None else {"codec": codec}
    write_ours(frame, tmp_path / "ours", recordType="Example", **options)
    theirs = read_theirs(connector, spark, tmp_path / "ours", frame.schema, recordType="Example")
    assert theirs.schema.simpleString() == frame.schema.simpleString()
    assert collect(theirs) == collect(frame)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, GZIP])
def test_we_read_the_connectors_examples_as_the_same_frame(
    connector, spark, frame, tmp_path, codec
):
    options = {} if codec is None else {"codec": codec}
    write_theirs(connector, frame, tmp_path / "theirs", recordType="Example", **options)
    ours = spark.read.format("tfrecord").schema(frame.schema).load(str(tmp_path / "theirs"))
    assert collect(ours) == collect(frame)


@pytest.mark.slow
def test_both_infer_the_same_types(connector, spark, frame, tmp_path):
    write_ours(frame, tmp_path / "ours")
    # The shards alone: our manifest knows the columns as they were.
    (tmp_path / "shards").mkdir()
    for shard in (tmp_path / "ours").glob("part-*"):
        shard.rename(tmp_path / "shards" / shard.name)
    ours = spark.read.format("tfrecord").load(str(tmp_path / "shards"))
    theirs = read_theirs(connector, spark, tmp_path / "shards", None)
    assert {f.name: f.dataType for f in ours.schema} == {f.name: f.dataType for f in theirs.schema}


@pytest.mark.slow
def test_byte_arrays_go_both_ways(connector, spark, tmp_path):
    rows = [(b"",), (b"\x00",), (bytes(range(256)),), (b"z" * 100_000,)]
    frame = spark.createDataFrame(rows, "byteArray binary").repartition(2)
    write_ours(frame, tmp_path / "ours", recordType="ByteArray")
    theirs = read_theirs(
        connector, spark, tmp_path / "ours", frame.schema, recordType="ByteArray"
    )  # fmt: skip
    assert collect(theirs) == collect(frame)
    write_theirs(connector, frame, tmp_path / "theirs", recordType="ByteArray")
    ours = spark.read.format("tfrecord").option("recordType", "ByteArray")
    assert collect(ours.load(str(tmp_path / "theirs"))) == collect(frame)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SEQUENCES, reason="this version has no record type SequenceExample")
@pytest.mark.parametrize("codec", [None, GZIP])
def test_sequence_examples_go_both_ways(connector, spark, tmp_path, codec):
    schema = f"{SCHEMA}, ll array<array<long>>, ff array<array<float>>, ss array<array<string>>"
    nested: list[tuple[Any, ...]] = [
        ([[1, 2], [3]], [[0.5], []], [["a"], ["", "ü"]]),
        (None, None, None),
        ([], [], []),
        ([list(INT64), []], [[math.inf]], [["x" * 1000]]),
        ([[7]] * 300, [[0.5, 1.5]] * 300, [["y"]] * 300),
    ]
    rows = [(*row, *more) for row, more in zip(ROWS, nested, strict=True)]
    frame = spark.createDataFrame(rows, schema).repartition(2)
    options = {"recordType": "SequenceExample", **({} if codec is None else {"codec": codec})}
    write_ours(frame, tmp_path / "ours", **options)
    theirs = read_theirs(
        connector, spark, tmp_path / "ours", frame.schema, recordType="SequenceExample"
    )
    assert collect(theirs) == collect(frame)
    write_theirs(connector, frame, tmp_path / "theirs", **options)
    reader = spark.read.format("tfrecord").option("recordType", "SequenceExample")
    assert collect(reader.schema(frame.schema).load(str(tmp_path / "theirs"))) == collect(frame)


@pytest.mark.slow
def test_empty_files_of_the_connector_are_read_as_no_rows(connector, spark, tmp_path):
    frame = spark.createDataFrame([(1,), (2,)], "id long").where("id < 0")
    write_theirs(connector, frame, tmp_path / "theirs")
    files = list((tmp_path / "theirs").glob("part-*"))
    assert files
    assert all(file.stat().st_size == 0 for file in files)
    ours = spark.read.format("tfrecord").schema("id long").load(str(tmp_path / "theirs"))
    assert ours.count() == 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_build_by_either_writer_gives_equal_rows(
    connector, built, tmp_path, compression
):  # fmt: skip
    logs = write_logs(tmp_path / "logs")
    config = build_config(
        logs, tmp_path,
        output={"root": str(tmp_path / "datasets"), "shards": 2, "eval_shards": 1,
                "writer": "connector", "compression": compression},
    )  # fmt: skip
    version = Path(connector.call("build", config=config.resolved())["version"])
    theirs, ours = read_manifest(version), built[0].manifest
    suffix = ".gz" if compression else ""
    assert [(s.path, s.rows) for split in theirs.splits for s in split.shards] == [
        (f"{s.path}{suffix}", s.rows) for split in ours.splits for s in split.shards
    ]
    for name in ("schema", "label_rate", "counts", "encoders_fingerprint"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.statistics == without_raw(ours.statistics)
    wire = [WireFeature(s.name, s.dtype, s.is_list) for s in ours.schema.features]
    for split in ours.splits:
        for shard in split.shards:
            native = read_file(built[0].version / shard.path, wire)
            assert read_file(version / f"{shard.path}{suffix}", wire).equals(native)
    for split in theirs.splits:
        for shard in split.shards:
            assert (version / shard.path).stat().st_size == shard.bytes
    assert not (version / "records").exists()


@pytest.mark.slow
def test_times_are_refused_by_us_before_a_job_starts_where_the_connector_fails_in_it(
    connector, spark, tmp_path
):
    frame = spark.createDataFrame([(datetime.date(2026, 1, 1),)], "day date")
    with pytest.raises(Exception, match="unsupported data type"):
        write_theirs(connector, frame, tmp_path / "theirs")
    with pytest.raises(Exception, match=r"day.*date"):
        write_ours(frame, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


Kind = Literal["int64", "float32", "bytes"]
KINDS = {"int64": pa.int64(), "float32": pa.float32(), "bytes": pa.string()}
CONNECTOR_DECODERS_ROWS = 200


@pytest.fixture(scope="module")
def connector_decoders_connector(tmp_path_factory: pytest.TempPathFactory):
    if CONNECTOR_JAR_VARIABLE not in os.environ:
        pytest.skip(f"{CONNECTOR_JAR_VARIABLE} is not set: no JVM connector to test against")
    with ConnectorSession(tmp_path_factory.mktemp("connector") / "stderr.log") as session:
        yield session


def draw_columns(record_type: str) -> pa.Table:
    """Scalars and lists of each kind with nulls and empty lists; steps in sequence records."""
    rng = np.random.default_rng(7)

    def draw(kind: str) -> object:
        number = int(rng.integers(-(2**40), 2**40))
        return {"int64": number, "float32": float(np.float32(rng.normal())), "bytes": f"t{number}"}[
            kind
        ]

    columns = {"row": pa.array(range(CONNECTOR_DECODERS_ROWS), pa.int64())}
    for kind, value_type in KINDS.items():
        scalars = [
            None if rng.random() < 0.2 else draw(kind) for _ in range(CONNECTOR_DECODERS_ROWS)
        ]
        columns[kind] = pa.array(scalars, value_type)
        lists = [
            [draw(kind) for _ in range(rng.integers(0, 6))] for _ in range(CONNECTOR_DECODERS_ROWS)
        ]
        columns[f"{kind}s"] = pa.array(lists, pa.list_(value_type))
        if record_type == "SequenceExample":
            steps = [
                [[draw(kind)] * int(rng.integers(1, 4)) for _ in range(rng.integers(0, 4))]
                for _ in range(CONNECTOR_DECODERS_ROWS)
            ]
            columns[f"{kind}_steps"] = pa.array(steps, pa.list_(pa.list_(value_type)))
    return pa.table(columns)


def list_features(table: pa.Table) -> tuple[WireFeature, ...]:
    return tuple(
        WireFeature(name, find_kind(name), name not in (*KINDS, "row"), name.endswith("_steps"))
        for name in table.column_names
    )


def find_kind(name: str) -> Kind:
    return next((kind for kind in ("float32", "bytes") if name.startswith(kind)), "int64")


def to_bytes(values: Any) -> Any:
    """The same values with text as the wire has it."""
    if isinstance(values, list):
        return [to_bytes(value) for value in values]
    return values.encode() if isinstance(values, str) else values


def plain(column: pa.Array, name: str) -> list:
    values = column.to_pylist()
    return [[] if value is None and name not in KINDS else value for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("record_type", ["Example", "SequenceExample"])
def test_the_decoders_agree_on_the_connectors_records(
    record_type: str, connector_decoders_connector: ConnectorSession, tmp_path: Path
) -> None:
    from tests.tensorflow_decoder import TensorFlowDecoder  # it loads TensorFlow

    table = draw_columns(record_type)
    pq.write_table(table, tmp_path / "table.parquet")
    records = tmp_path / "records"
    connector_decoders_connector.call(
        "write", table=str(tmp_path / "table.parquet"), records=str(records),
        options={"recordType": record_type},
    )  # fmt: skip
    features = list_features(table)
    decoders = [build_decoder(features, record_type), TensorFlowDecoder(features, record_type)]
    found: dict[int, dict[str, object]] = {}
    for file in sorted(records.glob("part-*")):
        for block in read_record_blocks(str(file)):
            block_columns, tensor_columns = (
                {n: plain(c, n) for n, c in zip(b.schema.names, b.columns, strict=True)}
                for b in (decoder.decode_block(block, str(file)) for decoder in decoders)
            )
            assert block_columns == tensor_columns
            for i, row in enumerate(block_columns["row"]):
                found[row] = {name: values[i] for name, values in block_columns.items()}
    assert sorted(found) == list(range(CONNECTOR_DECODERS_ROWS))
    for name in table.column_names:
        written = table.column(name).to_pylist()
        assert [found[row][name] for row in range(CONNECTOR_DECODERS_ROWS)] == to_bytes(written), (
            name
        )
