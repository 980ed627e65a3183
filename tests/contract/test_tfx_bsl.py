"""tfx_bsl decodes what we encode and we decode what it encodes.

Needs an environment with tfx_bsl, whose Python SLUICE_TFX_PYTHON names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from etl.tfrecord.decode import ExampleDecoder, WireFeature
from etl.tfrecord.encode import build_encoder, encode
from etl.tfrecord.framing import index_records
from jobs.bench.tfrecord.peers import PeerMissingError, TfxBsl, find_tfx_bsl
from jobs.bench.tfrecord.tfx_peer import read_batch, write_batch

pytestmark = pytest.mark.slow

FEATURES = [
    WireFeature("i", "int64"),
    WireFeature("f", "float32"),
    WireFeature("b", "bytes"),
    WireFeature("ints", "int64", is_list=True),
    WireFeature("floats", "float32", is_list=True),
    WireFeature("blobs", "bytes", is_list=True),
]
ROWS: list[dict[str, Any]] = [
    {"i": 1, "f": 0.5, "b": b"x", "ints": [1, -2], "floats": [0.25], "blobs": [b"a", b""]},
    {"i": None, "f": None, "b": None, "ints": None, "floats": None, "blobs": None},
    {"i": -(2**63), "f": float("-inf"), "b": b"", "ints": [], "floats": [], "blobs": []},
    {"i": 2**63 - 1, "f": 2.0**-149, "b": bytes(range(256)), "ints": [0] * 1000,
     "floats": [float("inf"), -0.0], "blobs": ["ü".encode() * 1000]},
]  # fmt: skip


@pytest.fixture(scope="module")
def tfx() -> TfxBsl:
    try:
        return find_tfx_bsl()
    except PeerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def batch() -> pa.RecordBatch:
    schema = pa.schema([(feature.name, feature.arrow_type) for feature in FEATURES])
    return pa.RecordBatch.from_pylist(ROWS, schema)


def as_lists(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The form that tfx_bsl knows: every feature a list, an absent one null."""
    return [
        {k: v if v is None or isinstance(v, list) else [v] for k, v in row.items()} for row in rows
    ]


def payloads(data: np.ndarray) -> list[bytes]:
    return [data[s : s + n].tobytes() for s, n in index_records(data).tolist()]


def test_tfx_bsl_decodes_what_we_encode(tfx: TfxBsl, batch: pa.RecordBatch, tmp_path: Path):
    records = pa.array(payloads(build_encoder(batch.schema).encode(batch)), pa.binary())
    write_batch(str(tmp_path / "records.arrow"), pa.record_batch([records], ["record"]))
    write_batch(str(tmp_path / "template.arrow"), batch)
    tfx.run(
        "decode", tmp_path / "records.arrow", tmp_path / "rows.arrow", tmp_path / "template.arrow"
    )
    decoded = read_batch(str(tmp_path / "rows.arrow")).select(batch.schema.names)
    assert decoded.to_pylist() == as_lists(ROWS)


def test_we_decode_what_tfx_bsl_encodes(tfx: TfxBsl, batch: pa.RecordBatch, tmp_path: Path):
    write_batch(str(tmp_path / "rows.arrow"), batch)
    tfx.run("encode", tmp_path / "rows.arrow", tmp_path / "records.arrow")
    # Framed as raw payloads: the records themselves stay as tfx_bsl made them.
    data = encode(read_batch(str(tmp_path / "records.arrow")), "ByteArray")
    decoded = ExampleDecoder(FEATURES).decode(data, index_records(data))
    assert decoded.to_pylist() == ROWS
