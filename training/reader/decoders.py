"""Blocks of records to Arrow columns: two decoders behind one interface.

`block` is the compiled, column-wise decoder of the wire. `tensorflow` is `tf.io.parse_example` on
whole blocks, the reference that the other is held against. Both return the same columns, so all
that follows is one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from conf.errors import ConfigError, install_hint
from conf.schema import PackedSlot, packed_lengths
from etl.tfrecord.reading import (
    BadRecord,
    PackedDecoder,
    RecordBlock,
    WireFeature,
    build_decoder,
    has_slots,
    packed_features,
)


class BlockDecoder(Protocol):
    """Decodes blocks of records; belongs to one thread."""

    def decode_block(self, block: RecordBlock, name: str) -> pa.RecordBatch:
        """Decodes a block.

        Args:
            block: Records whose framing is sound.
            name: What to call the file in an error.

        Returns:
            One column per feature, `[rows]`; a scalar that a record lacks is null.

        Raises:
            CorruptRecordError: A record is not well-formed.
            InputDataError: A feature holds another kind of values, or several where one is wanted.
        """

    def decode_sound(self, block: RecordBlock, name: str) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block, and tells which were left out."""


def build_block_decoder(
    kind: str,
    features: Sequence[WireFeature],
    record_type: str,
    slots: Sequence[PackedSlot] = (),
) -> BlockDecoder:
    """Builds a decoder.

    Args:
        kind: `"block"` or `"tensorflow"`.
        features: What to decode, in the order of the columns.
        record_type: `"Example"` or `"SequenceExample"`.
        slots: Places of features in packed features, as the manifest tells them.

    Raises:
        ConfigError: TensorFlow is asked for and not installed.
    """
    if kind != "tensorflow":
        return build_decoder(features, record_type, slots)
    try:
        # Imported here alone: whoever reads by the other decoder needs no TensorFlow.
        from training.reader.tensorflow_decoder import TensorFlowDecoder
    except ModuleNotFoundError as error:
        raise ConfigError(
            "decoder 'tensorflow' needs TensorFlow, which is not installed",
            received=f"no module {error.name!r}",
            allowed="decoder 'block', which gives the same batches",
            fix=install_hint("training"),
        ) from error
    if not has_slots(features, slots):
        return TensorFlowDecoder(features, record_type)
    packed = packed_features(features, slots)
    inner = TensorFlowDecoder(packed, record_type, packed_lengths(slots))
    return PackedDecoder(inner, features, slots)
