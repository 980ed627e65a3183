"""Writes a MovieLens-like sample: `users.dat`, `movies.dat`, `ratings.dat`, `SAMPLE.json`.

The sample has structure worth learning. Movies form small niches within the genres, users prefer
niches by a latent taste that depends on their attributes and drifts, and popularity is Zipfian.
The bytes depend on the config (and on NumPy's generators), never on the number of workers: the
users are cut into fixed chunks, and each chunk has random streams of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from conf.errors import ConfigError
from etl.samples.catalogue import Catalogue, build_catalogue, format_movies
from etl.samples.config import SampleConfig
from etl.samples.dirt import DUPLICATE, MALFORMED_KINDS, UNKNOWN_KINDS, format_ratings, share_dirt
from etl.samples.interactions import Events, draw_events
from etl.samples.population import Users, build_effects, draw_activity, draw_users, format_users
from etl.samples.staging import stage_directory

CARD_NAME = "SAMPLE.json"
MAX_SINGLE_FILE_RATINGS = 10_000_000
_EVENT_STREAM, _DIRT_STREAM = 6, 7


@dataclass(frozen=True)
class Chunk:
    """One unit of work: a range of users (0-based) and what comes before it."""

    index: int
    users: range
    rows: int
    rows_before: int


def write_sample(
    config: SampleConfig,
    out_dir: Path,
    workers: int | None = None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """Generates a sample into a directory that appears complete or not at all.

    Above ten million ratings `ratings.dat` is a folder of part files.

    Args:
        config: Size, seed and dirt; decides every byte.
        out_dir: Directory to create.
        workers: Processes to use; None takes one per available core. With one worker, or one
            chunk, everything runs in this process.
        overwrite: Whether an earlier sample in `out_dir` may be replaced.
        on_progress: Called with the number of ratings written so far.

    Returns:
        The content of `SAMPLE.json`: config, files, and the exact number of lines of each kind.

    Raises:
        ConfigError: `out_dir` may not be replaced, or `workers` is below one.
        InternalError: The file system refused.
    """
    if workers is not None and workers < 1:
        raise ConfigError(
            "too few workers",
            received=workers,
            allowed="1 or more",
            fix="pass --workers 1 or leave it out",
        )
    with stage_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        chunks = plan_chunks(config)
        (staging / "movies.dat").write_bytes(format_movies(world_of(config), config))
        kinds: Counter[str] = Counter()
        many = config.ratings > MAX_SINGLE_FILE_RATINGS
        if many:
            (staging / "ratings.dat").mkdir()
        done = 0
        for chunk, counts in _run_chunks(config, chunks, staging, workers or _cores()):
            kinds.update(counts)
            _append(staging / "users.dat", _part(staging, "users", chunk.index))
            part = _part(staging, "ratings", chunk.index)
            if many:
                part.replace(staging / "ratings.dat" / f"part-{chunk.index:05d}")
            else:
                _append(staging / "ratings.dat", part)
            done += chunk.rows
            if on_progress is not None:
                on_progress(done)
        card = _build_card(config, kinds, staging, len(chunks))
        (staging / CARD_NAME).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return card


def plan_chunks(config: SampleConfig) -> list[Chunk]:
    """Cuts the users into ranges of about `rows_per_chunk` ratings; no user is split."""
    rows_after = np.cumsum(_activity(config))
    number = (rows_after - 1) // config.rows_per_chunk
    last = np.flatnonzero(np.append(number[1:] != number[:-1], True))
    chunks: list[Chunk] = []
    user, rows = 0, 0
    for index, end in enumerate(last.tolist()):
        total = int(rows_after[end])
        chunks.append(Chunk(index, range(user, end + 1), total - rows, rows))
        user, rows = end + 1, total
    return chunks


def _run_chunks(
    config: SampleConfig, chunks: list[Chunk], staging: Path, workers: int
) -> Iterator[tuple[Chunk, dict[str, int]]]:
    """Yields chunks in order, each with its dirt counts, as soon as its parts are on disk."""
    if workers == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield chunk, write_chunk(config, chunk, staging)
        return
    # Spawned, not forked: the caller may hold threads (Arrow, a JVM gateway).
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context) as pool:
        futures = [pool.submit(write_chunk, config, chunk, staging) for chunk in chunks]
        try:
            for chunk, future in zip(chunks, futures, strict=True):
                yield chunk, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def write_chunk(config: SampleConfig, chunk: Chunk, staging: Path) -> dict[str, int]:
    """Writes the user and rating lines of one chunk; returns its lines of dirt by kind."""
    users, events = draw_chunk(config, chunk)
    share = share_dirt(config, chunk.rows_before, chunk.rows)
    first_unknown = (config.size.users + 1, int(world_of(config).movie_ids.max()) + 1)
    rng = config.rng(_DIRT_STREAM, chunk.index)
    _part(staging, "ratings", chunk.index).write_bytes(
        format_ratings(events, share, first_unknown, rng)
    )
    _part(staging, "users", chunk.index).write_bytes(format_users(users, config, chunk.index))
    return share.count_kinds()


def draw_chunk(config: SampleConfig, chunk: Chunk) -> tuple[Users, Events]:
    """Draws the users of one chunk and all of their events."""
    users = draw_users(config, build_effects(config), chunk.users, chunk.index)
    activity = _activity(config)[chunk.users.start : chunk.users.stop]
    rng = config.rng(_EVENT_STREAM, chunk.index)
    return users, draw_events(world_of(config), users, activity, rng)


@lru_cache(maxsize=1)
def world_of(config: SampleConfig) -> Catalogue:
    """Returns the catalogue of a sample, built once per process."""
    return build_catalogue(config)


@lru_cache(maxsize=1)
def _activity(config: SampleConfig) -> npt.NDArray[np.int64]:
    return draw_activity(config)


def _build_card(
    config: SampleConfig, kinds: Counter[str], staging: Path, chunks: int
) -> dict[str, object]:
    size = config.size
    return {
        "format_version": 1,
        "config": {**asdict(config), "users": size.users, "movies": size.movies},
        "encoding": "latin-1",
        "separator": "::",
        "chunks": chunks,
        "files": {path.name: {"bytes": _size_bytes(path)} for path in sorted(staging.iterdir())},
        "lines": {
            "users.dat": size.users,
            "movies.dat": size.movies,
            "ratings.dat": size.ratings + kinds.total(),
        },
        "ratings": {
            "valid": size.ratings,
            "malformed": {kind: kinds[kind] for kind in MALFORMED_KINDS},
            "unknown": {kind: kinds[kind] for kind in UNKNOWN_KINDS},
            "duplicate": kinds[DUPLICATE],
        },
    }


def _part(staging: Path, name: str, index: int) -> Path:
    return staging / f".{name}-{index:05d}"


def _append(target: Path, part: Path) -> None:
    if not target.exists():
        part.replace(target)
        return
    with part.open("rb") as source, target.open("ab") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    part.unlink()


def _size_bytes(path: Path) -> int:
    if path.is_dir():
        return sum(child.stat().st_size for child in path.iterdir())
    return path.stat().st_size


def _cores() -> int:
    return len(os.sched_getaffinity(0))
