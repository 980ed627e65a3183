"""Shards for the benchmark, written once per shape."""

from __future__ import annotations

from pathlib import Path

from etl.tfrecord.encode import build_encoder
from jobs.bench.tfrecord.shapes import SHAPES, build_batch

_PIECE_ROWS = 20_000


def write_shards(
    name: str, rows: int, shards: int, directory: Path
) -> tuple[tuple[str, int, int], ...]:
    """Writes the shards of a shape, unless they are there.

    Args:
        name: Name of the shape.
        rows: Records in all.
        shards: Files.
        directory: Folder.

    Returns:
        Name, records and bytes of each file.
    """
    shape, found = SHAPES[name], []
    for number in range(shards):
        count = rows * (number + 1) // shards - rows * number // shards
        path = directory / f"{name}-{number}-of-{shards}-{count}.tfrecord"
        if not path.exists():
            with path.open("wb") as file:
                for first in range(0, count, _PIECE_ROWS):
                    piece = min(_PIECE_ROWS, count - first)
                    batch = build_batch(shape, piece, seed=number * rows + first)
                    file.write(build_encoder(batch.schema).encode(batch).data)
        found.append((path.name, count, path.stat().st_size))
    return tuple(found)
