"""Encodes records in the packed layout, as a dataset's manifest tells its slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from conf.layout import PackedSlot
from etl.tfrecord.encode import CHUNK_ROWS, build_encoder
from etl.tfrecord.lowering.slots import SlotPacking


class PackedEncoder:
    """Packs batches of one schema and encodes them; belongs to one thread."""

    def __init__(self, schema: pa.Schema, record_type: str, slots: Sequence[PackedSlot]) -> None:
        """Plans the encoding.

        Args:
            schema: Schema of the batches, before packing.
            record_type: `"Example"` or `"SequenceExample"`.
            slots: Every slot, in the order of the manifest.

        Raises:
            ConfigError: Columns that the wire cannot carry.
        """
        self.schema, self._packing = schema, SlotPacking(schema, slots)
        self._encoder = build_encoder(self._packing.schema, record_type)

    def encode_chunks(
        self, batch: pa.RecordBatch, chunk_rows: int = CHUNK_ROWS
    ) -> Iterator[np.ndarray]:
        """Encodes a batch in pieces; arguments and errors as for `ExampleEncoder`."""
        yield from self._encoder.encode_chunks(self._packing.apply(batch), chunk_rows)
