"""The files that training reads, with what proves them whole."""

from __future__ import annotations

from collections.abc import Sequence

from conf.manifest import Manifest
from jobs.reporting.blocks import Block, Cell, Column, Details, Note, Section, build_table, missing
from jobs.reporting.numbers import MISSING, format_bytes, format_count
from jobs.reporting.run_data import RunData

_LISTED_SHARDS = 200
_OPEN_UP_TO = 24


def build_shards(data: RunData) -> Section:
    """Splits with their sizes, then each shard."""
    manifest = data.manifest
    if manifest is None:
        return Section("shards", "Shards", "The TFRecord files.", (missing(data.gaps["dataset"]),))
    compression = f"{manifest.compression} compressed" if manifest.compression else "uncompressed"
    packed = ", scalars of one type packed into one list" if manifest.slots else ""
    lead = f"Standard TFRecord files of {manifest.record_type} records, {compression}{packed}."
    total = sum(len(split.shards) for split in manifest.splits)
    listing: list[Block] = [_shard_table(manifest)]
    if total > _LISTED_SHARDS:
        listing.append(Note(f"The first {_LISTED_SHARDS} of {total:,}; the manifest lists all."))
    details = Details(f"All {total:,} shards", tuple(listing), is_open=total <= _OPEN_UP_TO)
    return Section("shards", "Shards", lead, (_split_table(manifest), details))


def _split_table(manifest: Manifest) -> Block:
    columns = (Column("Split", numeric=False), Column("Shards"), Column("Rows"), Column("Bytes"),
               Column("Rows per shard", hint="least to most"),
               Column("Bytes per row"))  # fmt: skip
    rows = []
    for split in manifest.splits:
        sizes = [shard.rows for shard in split.shards]
        rows.append(
            [
                split.name,
                format_count(len(sizes)),
                format_count(split.rows),
                format_bytes(split.bytes),
                _spread(sizes),
                format_count(split.bytes / split.rows if split.rows else None),
            ]
        )
    return build_table("Records and bytes of each split.", columns, rows)


def _spread(sizes: Sequence[int]) -> str:
    if not sizes:
        return MISSING
    low, high = min(sizes), max(sizes)
    return f"{low:,} to {high:,}" if low < high else f"{low:,} each"


def _shard_table(manifest: Manifest) -> Block:
    shards = [(split.name, shard) for split in manifest.splits for shard in split.shards]
    top = max((shard.bytes for _, shard in shards), default=0) or 1
    columns = (Column("File", numeric=False), Column("Split", numeric=False), Column("Rows"),
               Column("Bytes"), Column("CRC-32C", numeric=False))  # fmt: skip
    return build_table(
        "Files in the order in which they are listed.",
        columns,
        [
            [
                shard.path,
                name,
                format_count(shard.rows),
                Cell(format_bytes(shard.bytes), bar=shard.bytes / top),
                shard.crc32c,
            ]
            for name, shard in shards[:_LISTED_SHARDS]
        ],
    )
