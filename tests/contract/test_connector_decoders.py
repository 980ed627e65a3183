"""Both decoders of the trainer's input read what the JVM connector writes, and as the same.

Needs the connector's jar in SLUICE_CONNECTOR_JAR.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.tfrecord.decode import WireFeature
from etl.tfrecord.framing import read_record_blocks
from jobs.bench.tfrecord.peers import CONNECTOR_JAR_VARIABLE
from tests.contract.connector_client import ConnectorSession

pytestmark = pytest.mark.slow

Kind = Literal["int64", "float32", "bytes"]
KINDS = {"int64": pa.int64(), "float32": pa.float32(), "bytes": pa.string()}
ROWS = 200


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory):
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

    columns = {"row": pa.array(range(ROWS), pa.int64())}
    for kind, value_type in KINDS.items():
        scalars = [None if rng.random() < 0.2 else draw(kind) for _ in range(ROWS)]
        columns[kind] = pa.array(scalars, value_type)
        lists = [[draw(kind) for _ in range(rng.integers(0, 6))] for _ in range(ROWS)]
        columns[f"{kind}s"] = pa.array(lists, pa.list_(value_type))
        if record_type == "SequenceExample":
            steps = [
                [[draw(kind)] * int(rng.integers(1, 4)) for _ in range(rng.integers(0, 4))]
                for _ in range(ROWS)
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


@pytest.mark.parametrize("record_type", ["Example", "SequenceExample"])
def test_the_decoders_agree_on_the_connectors_records(
    record_type: str, connector: ConnectorSession, tmp_path: Path
) -> None:
    from training.input.decoders import build_block_decoder

    table = draw_columns(record_type)
    pq.write_table(table, tmp_path / "table.parquet")
    records = tmp_path / "records"
    connector.call(
        "write", table=str(tmp_path / "table.parquet"), records=str(records),
        options={"recordType": record_type},
    )  # fmt: skip
    features = list_features(table)
    decoders = [
        build_block_decoder(kind, features, record_type) for kind in ("block", "tensorflow")
    ]
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
    assert sorted(found) == list(range(ROWS))
    for name in table.column_names:
        written = table.column(name).to_pylist()
        assert [found[row][name] for row in range(ROWS)] == to_bytes(written), name
