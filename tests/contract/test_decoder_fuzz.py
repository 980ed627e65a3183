"""Mutated records never crash, hang or mislead the decoder.

The default size suits every run of the suite; set SLUICE_FUZZ_RECORDS to millions for more.

What is checked of an accepted record is that protobuf understands it alike. Where protobuf (upb)
refuses a record that is accepted here there is nothing to compare: it also looks at features that
were not asked for, and refuses keys that are no UTF-8; and it drops map entries that hold unknown
fields.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from etl.tfrecord.codec.decode import build_decoder
from tests.contract import decoder_fuzz
from tests.machine import examples

RECORDS = int(os.environ.get("SLUICE_FUZZ_RECORDS", examples(200_000)))
ROOT = Path(__file__).parents[2]
MEMBERS = {"int64": "int64_list", "float32": "float_list", "bytes": "bytes_list"}


def fill(feature: tf.train.Feature, kind: str, rng: np.random.Generator, most: int) -> None:
    target = getattr(feature, MEMBERS[kind])
    target.SetInParent()
    for _ in range(rng.integers(0, most + 1)):
        if kind == "int64":
            target.value.append(int(rng.integers(-(2**63), 2**63 - 1) >> int(rng.integers(0, 63))))
        elif kind == "float32":
            target.value.append(float(np.float32(rng.normal())))
        else:
            target.value.append(rng.bytes(rng.integers(0, 20)))


def build_record(record_type: str, rng: np.random.Generator) -> bytes:
    """A valid record in which any feature may be absent."""
    message = getattr(tf.train, record_type)()
    map_of = message.features if record_type == "Example" else message.context
    for wanted in decoder_fuzz.FEATURES[record_type]:
        if rng.random() < 0.15:
            continue
        if wanted.is_sequence:
            lists = message.feature_lists.feature_list[wanted.name]
            lists.SetInParent()
            for _ in range(rng.integers(0, 4)):
                fill(lists.feature.add(), wanted.kind, rng, 3)
        else:
            # Long lists are read in blocks, short ones byte by byte.
            most = (90 if rng.random() < 0.2 else 6) if wanted.is_list else 1
            fill(map_of.feature[wanted.name], wanted.kind, rng, most)
    return message.SerializeToString()


def as_protobuf_sees(record_type: str, payload: bytes) -> dict | None:
    """One row by protobuf; None where it is no reference."""
    try:
        message = getattr(tf.train, record_type).FromString(payload)
    except DecodeError:
        return None
    is_example = record_type == "Example"
    plain = message.features if is_example else message.context
    maps = [plain] if is_example else [plain, message.feature_lists]
    if any(unknown.field_number == 1 for part in maps for unknown in UnknownFieldSet(part)):
        return None
    row: dict = {}
    for wanted in decoder_fuzz.FEATURES[record_type]:
        member = MEMBERS[wanted.kind]
        if wanted.is_sequence:
            lists = message.feature_lists.feature_list
            row[wanted.name] = (
                [list(getattr(f, member).value) for f in lists[wanted.name].feature]
                if wanted.name in lists
                else None
            )
            continue
        found = plain.feature.get(wanted.name)
        if found is None or found.WhichOneof("kind") is None:
            row[wanted.name] = None
            continue
        values = list(getattr(found, member).value)
        row[wanted.name] = values if wanted.is_list else (values or [None])[0]
    return row


@pytest.mark.slow
@pytest.mark.parametrize("record_type", ["Example", "SequenceExample"])
def test_mutated_records(record_type: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpus = [build_record(record_type, rng) for _ in range(400)]
    np.savez(
        tmp_path / "corpus.npz", corpus=np.frombuffer(b"".join(corpus), np.uint8),
        starts=np.cumsum([0, *map(len, corpus)]),
    )  # fmt: skip
    records = RECORDS // 2
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(decoder_fuzz.__file__)), record_type, str(records), "1",
         str(tmp_path / "corpus.npz"), str(tmp_path / "result.npz")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300 + records / 2000,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    result = np.load(tmp_path / "result.npz")
    counts = result["counts"]
    print(record_type, counts.tolist(), f"{time.perf_counter() - start:.1f} s")
    assert counts.sum() == records
    assert counts[0] > records // 10  # accepted
    assert counts[1] > records // 10  # malformed
    compared = 0
    decoder = build_decoder(decoder_fuzz.FEATURES[record_type], record_type)
    for sample, length in zip(result["samples"], result["lengths"].tolist(), strict=True):
        payload = sample[:length]
        expected = as_protobuf_sees(record_type, payload.tobytes())
        batch = decoder.decode(payload, np.array([[0, length]]))
        batch.validate(full=True)
        if expected is not None:
            assert repr(batch.to_pylist()) == repr([expected])  # NaN is NaN
            compared += 1
    assert compared > len(result["samples"]) // 4
