"""Shards for the benchmark, written once per shape."""

from __future__ import annotations

from pathlib import Path

from conf.layout import PackedSlot
from etl.tfrecord.encode import build_encoder
from etl.tfrecord.encode_packed import PackedEncoder
from jobs.bench.tfrecord.shapes import SHAPES, build_batch

_PIECE_ROWS = 20_000


def write_shards(
    name: str, rows: int, shards: int, directory: Path, slots: tuple[PackedSlot, ...] = ()
) -> tuple[tuple[str, int, int], ...]:
    """Writes the shards of a shape, unless they are there.

    Args:
        name: Name of the shape.
        rows: Records in all.
        shards: Files.
        directory: Folder.
        slots: Places of columns in packed features; none for the layout of a feature per column.

    Returns:
        Name, records and bytes of each file.
    """
    shape, found = SHAPES[name], []
    schema, layout = build_batch(shape, 0).schema, "-packed" if slots else ""
    encoder = PackedEncoder(schema, "Example", slots) if slots else build_encoder(schema)
    for number in range(shards):
        count = rows * (number + 1) // shards - rows * number // shards
        path = directory / f"{name}{layout}-{number}-of-{shards}-{count}.tfrecord"
        if not path.exists():
            with path.open("wb") as file:
                for first in range(0, count, _PIECE_ROWS):
                    piece = min(_PIECE_ROWS, count - first)
                    batch = build_batch(shape, piece, seed=number * rows + first)
                    file.writelines(chunk.data for chunk in encoder.encode_chunks(batch))
        found.append((path.name, count, path.stat().st_size))
    return tuple(found)
