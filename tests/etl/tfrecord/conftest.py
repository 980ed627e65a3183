"""What the wire's tests share: TensorFlow and protobuf as independent references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf


def build_example(row: Mapping[str, Any], schema: pa.Schema) -> tf.train.Example:
    """One row as protobuf itself builds it; None leaves the feature out."""
    example = tf.train.Example()
    example.features.SetInParent()
    for field in schema:
        value = row[field.name]
        if value is None:
            continue
        is_list = hasattr(field.type, "value_field")
        value_type = field.type.value_type if is_list else field.type
        values = list(value) if is_list else [value]
        feature = example.features.feature[field.name]
        if pa.types.is_integer(value_type) or pa.types.is_boolean(value_type):
            feature.int64_list.SetInParent()
            feature.int64_list.value.extend(int(v) for v in values)
        elif pa.types.is_floating(value_type) or pa.types.is_decimal(value_type):
            feature.float_list.SetInParent()
            feature.float_list.value.extend(np.asarray(values, np.float64).astype(np.float32))
        else:
            feature.bytes_list.SetInParent()
            feature.bytes_list.value.extend(v.encode() if isinstance(v, str) else v for v in values)
    return example


def canonical(example: tf.train.Example) -> bytes:
    """Bytes that are equal for equal messages, NaN included."""
    return example.SerializeToString(deterministic=True)


@pytest.fixture(scope="session")
def expected_examples() -> Callable[[pa.RecordBatch], list[bytes]]:
    """Canonical bytes of a batch's rows, built by protobuf."""

    def build(batch: pa.RecordBatch) -> list[bytes]:
        rows = batch.to_pylist()
        return [canonical(build_example(row, batch.schema)) for row in rows]

    return build


@pytest.fixture(scope="session")
def parsed_examples() -> Callable[[Iterable[bytes]], list[bytes]]:
    """Canonical bytes of serialized examples, as protobuf understands them."""

    def parse(payloads: Iterable[bytes]) -> list[bytes]:
        return [canonical(tf.train.Example.FromString(payload)) for payload in payloads]

    return parse


@pytest.fixture(scope="session")
def frame() -> Callable[[Iterable[bytes]], bytes]:
    """Frames payloads with a CRC of the fixture's own."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)

    def masked(data: bytes) -> bytes:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        return crc.to_bytes(4, "little")

    def build(payloads: Iterable[bytes]) -> bytes:
        parts = []
        for payload in payloads:
            length = len(payload).to_bytes(8, "little")
            parts += [length, masked(length), payload, masked(payload)]
        return b"".join(parts)

    return build
