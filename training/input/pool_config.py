"""What pools of decoded rows are made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from conf.layout import PackedSlot
from etl.tfrecord.decode import WireFeature
from training.input.columns import Column
from training.input.damage import DamagePolicy
from training.input.decoders import BlockDecoder, build_block_decoder
from training.input.filters import RowFilter
from training.input.shard_cache import ShardCache

LENGTH = "\0length"
"""Column that holds the length of a row's longest list, where batches of like length are made."""


@dataclass(frozen=True)
class PoolConfig:
    """What pools are made of.

    Attributes:
        columns: Features to deliver.
        row_filter: Which rows are kept; None keeps all.
        record_type: `Example` or `SequenceExample`.
        decoder: `block` or `tensorflow`.
        threads: Threads that read and decode.
        damage: What becomes of damage.
        binary_label: Feature whose values must be 0 or 1; None checks none.
        has_lengths: Whether to deliver the length of each row's longest list.
        cache: Where decoded shards are kept; None for nowhere.
        slots: Places of features in packed features.
    """

    columns: tuple[Column, ...]
    row_filter: RowFilter | None = None
    record_type: str = "Example"
    decoder: str = "block"
    threads: int = 1
    damage: DamagePolicy = field(default_factory=DamagePolicy)
    binary_label: str | None = None
    has_lengths: bool = False
    cache: ShardCache | None = None
    slots: tuple[PackedSlot, ...] = ()

    @property
    def features(self) -> tuple[WireFeature, ...]:
        """What is decoded: the columns, and what the filter looks at beside them."""
        extra = self.row_filter.columns if self.row_filter is not None else ()
        wires = {column.name: column.wire for column in (*extra, *self.columns)}
        return tuple(wires.values())

    @functools.cached_property
    def places(self) -> tuple[tuple[Column, int], ...]:
        """The columns, and where each stands among the features."""
        positions = {feature.name: number for number, feature in enumerate(self.features)}
        return tuple((column, positions[column.name]) for column in self.columns)

    @functools.cached_property
    def are_dense(self) -> tuple[bool, ...]:
        """Which of the columns are dense."""
        return tuple(column.is_dense for column in self.columns)

    def build_decoder(self) -> BlockDecoder:
        """Builds a decoder for one thread."""
        return build_block_decoder(self.decoder, self.features, self.record_type, self.slots)
