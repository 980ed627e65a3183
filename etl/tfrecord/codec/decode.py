"""Decodes TFRecord bytes into Arrow, column by column, without a Python object per record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError
from conf.schema import PackedSlot
from conf.storage.locations import Compression, Opener, open_local
from etl.tfrecord.codec.decode_columns import (
    BadRecord,
    ColumnDecoder,
    Decoder,
    build_empty,
    check_features,
    check_index,
    gather_binary,
)
from etl.tfrecord.codec.decode_packed import PackedDecoder, has_slots, packed_features
from etl.tfrecord.codec.framing import RecordBlock, read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector, infer_features
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, Kind, WireFeature

__all__ = [
    "BadRecord", "ByteArrayDecoder", "ExampleDecoder", "FeatureCollector", "Kind",
    "SequenceDecoder", "WireFeature", "build_decoder", "infer_features", "read_batches",
]  # fmt: skip


class ExampleDecoder(ColumnDecoder):
    """Decodes the wanted features of `tf.train.Example` records; skips all others.

    A feature that a record lacks is null, and so is an empty list where a scalar is wanted. A
    decoder learns the order of the features as it goes and belongs to one thread.
    """

    _message = "tf.train.Example"

    def __init__(self, features: Sequence[WireFeature]) -> None:
        """Plans the decoding.

        Args:
            features: What to decode, in the order of the columns.

        Raises:
            ConfigError: An unknown kind, a name that occurs twice, or a feature list.
        """
        super().__init__(features)
        for feature in self.features:
            if feature.is_sequence:
                raise ConfigError(
                    f"feature {feature.name!r} is a feature list, which tf.train.Example lacks",
                    fix="read the files with record type SequenceExample",
                )


class SequenceDecoder(ColumnDecoder):
    """Decodes the wanted features of `tf.train.SequenceExample` records; skips all others.

    A feature list becomes a list of lists: null where a record lacks it, an empty inner list for
    a feature without values. Features that are no feature lists are looked for in the context. A
    decoder learns the order of the features as it goes and belongs to one thread.
    """

    _message = "tf.train.SequenceExample"


class ByteArrayDecoder(Decoder):
    """Takes records as they are: one binary column, copied once."""

    def __init__(self, features: Sequence[WireFeature] = (BYTE_ARRAY_FEATURE,)) -> None:
        """Plans the decoding.

        Args:
            features: The one column's name, of kind bytes; none to count records only.

        Raises:
            ConfigError: Several features, or one that is no plain byte string.
        """
        self.features = check_features(tuple(features))
        if len(features) > 1 or any(f.arrow_type != pa.binary() for f in features):
            raise ConfigError(
                "record type ByteArray holds one byte string per record",
                received=", ".join(f"{f.name} ({f.arrow_type})" for f in features),
                allowed="one feature of kind bytes, no list",
            )
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""
        data = np.ascontiguousarray(block.data)
        index = check_index(block.index, data.size)
        if not self.features:
            return build_empty(len(index))
        return pa.RecordBatch.from_arrays([gather_binary(data, index)], schema=self.schema)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """As `decode_block`: no byte string is malformed."""
        return self.decode_block(block, name), []


def build_decoder(
    features: Sequence[WireFeature], record_type: str = "Example", slots: Sequence[PackedSlot] = ()
) -> ExampleDecoder | SequenceDecoder | ByteArrayDecoder | PackedDecoder:
    """Builds the decoder of a record type.

    Args:
        features: What to decode, in the order of the columns.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.
        slots: Places of features in packed features, as the dataset's manifest tells them.

    Returns:
        A decoder with `schema`, `decode`, `decode_block` and `decode_sound`.

    Raises:
        ConfigError: Unknown record type, or features that it does not have.
    """
    if has_slots(features, slots):
        inner = build_decoder(packed_features(features, slots), record_type)
        return PackedDecoder(inner, features, slots)
    if record_type == "Example":
        return ExampleDecoder(features)
    if record_type == "SequenceExample":
        return SequenceDecoder(features)
    if record_type == "ByteArray":
        return ByteArrayDecoder(features)
    raise ConfigError(
        "unknown TFRecord record type",
        received=repr(record_type),
        allowed="Example, SequenceExample, ByteArray",
    )


def read_batches(
    path: str | Path,
    features: Sequence[WireFeature],
    *,
    compression: Compression | Literal["auto"] | None = "auto",
    record_type: str = "Example",
    opener: Opener = open_local,
    slots: Sequence[PackedSlot] = (),
) -> Iterator[pa.RecordBatch]:
    """Reads a file batch by batch, each of some megabytes of records.

    Args:
        path: TFRecord file, plain or compressed.
        features: What to decode.
        compression: As for `read_record_blocks`.
        record_type: As for `build_decoder`.
        opener: As for `read_record_blocks`.
        slots: As for `build_decoder`.

    Yields:
        Batches in file order.

    Raises:
        CorruptRecordError: The file is damaged, or a record is not of the record type.
        InputDataError: A feature is not what was wanted.
    """
    decoder = build_decoder(features, record_type, slots)
    for block in read_record_blocks(path, compression=compression, opener=opener):
        yield decoder.decode_block(block, str(path))
