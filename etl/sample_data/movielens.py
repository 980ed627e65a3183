"""A MovieLens-like sample with dirt: `users.dat`, `movies.dat`, `ratings.dat`, `SAMPLE.json`.

Movies form niches within the genres, users prefer niches by a latent taste that depends on their
attributes and drifts, popularity is Zipfian. The bytes depend on the config (and on NumPy's
generators), never on the number of workers: users are cut into fixed chunks with random streams
of their own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError
from etl.sample_data.archive import replace_directory, write_card
from etl.sample_data.config import SampleConfig
from etl.sample_data.movies import Catalogue, Int64s, build_catalogue, format_movies
from etl.sample_data.ratings import (
    RatingEvents,
    Users,
    draw_activity,
    draw_events,
    draw_users,
    format_users,
)

CARD_NAME = "SAMPLE.json"
MAX_SINGLE_FILE_RATINGS = 10_000_000
MALFORMED_KINDS = ("wrong_field_count", "non_numeric_id", "rating_out_of_range", "empty_line")
UNKNOWN_KINDS = ("unknown_movie", "unknown_user")
DUPLICATE = "duplicate"
_BAD_RATINGS = (0, 6, -1, 11, 99)
_EVENT_STREAM, _DIRT_STREAM = 6, 7


@dataclass(frozen=True)
class SampleChunk:
    """One unit of work: a range of users (0-based) and what comes before it."""

    index: int
    users: range
    rows: int
    rows_before: int


@dataclass(frozen=True)
class DirtShare:
    """The part of the sample's dirt that falls on one chunk, as ranges of a global count.

    Args:
        malformed: Malformed lines; kinds take turns along the range.
        unknown: Lines with an unknown id; an unknown movie and an unknown user take turns.
        duplicates: Exact copies.
    """

    malformed: range
    unknown: range
    duplicates: range

    def count_kinds(self) -> dict[str, int]:
        """Returns the number of lines of each kind."""
        counts = Counter(MALFORMED_KINDS[n % len(MALFORMED_KINDS)] for n in self.malformed)
        counts.update(UNKNOWN_KINDS[n % len(UNKNOWN_KINDS)] for n in self.unknown)
        counts[DUPLICATE] = len(self.duplicates)
        return {kind: counts[kind] for kind in (*MALFORMED_KINDS, *UNKNOWN_KINDS, DUPLICATE)}


def share_dirt(config: SampleConfig, rows_before: int, rows: int) -> DirtShare:
    """Splits the exact total of each kind over chunks in proportion to their rows."""
    rates, edges = config.dirt, (rows_before, rows_before + rows)
    totals = [round(r * config.ratings) for r in (rates.dirty, rates.unknown, rates.duplicate)]
    return DirtShare(*(range(*(total * e // config.ratings for e in edges)) for total in totals))


def write_sample(
    config: SampleConfig,
    out_dir: Path,
    workers: int | None = None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
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
            "too few workers", received=workers, allowed="1 or more", fix="leave --workers out"
        )
    kinds: Counter[str] = Counter()
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        chunks = plan_chunks(config)
        (staging / "movies.dat").write_bytes(format_movies(build_world(config), config))
        ratings = staging / "ratings.dat"
        if many := config.ratings > MAX_SINGLE_FILE_RATINGS:
            ratings.mkdir()
        workers = workers or len(os.sched_getaffinity(0))
        for chunk, counts in _run_chunks(config, chunks, staging, workers):
            kinds.update(counts)
            _append(staging / "users.dat", _part(staging, "users", chunk))
            part = ratings / f"part-{chunk.index:05d}" if many else ratings
            _append(part, _part(staging, "ratings", chunk))
            on_progress(chunk.rows_before + chunk.rows)
        card = _build_card(config, kinds, staging, len(chunks))
        write_card(staging / CARD_NAME, card)
    return card


def plan_chunks(config: SampleConfig) -> list[SampleChunk]:
    """Cuts the users into ranges of about `rows_per_chunk` ratings; no user is split."""
    rows_after = np.cumsum(_activity(config))
    number = (rows_after - 1) // config.rows_per_chunk
    ends = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(rows_after)]
    before = [0, *(int(rows_after[end - 1]) for end in ends[1:])]
    return [
        SampleChunk(i, range(ends[i], ends[i + 1]), before[i + 1] - before[i], before[i])
        for i in range(len(ends) - 1)
    ]


def _run_chunks(
    config: SampleConfig, chunks: list[SampleChunk], staging: Path, workers: int
) -> Iterator[tuple[SampleChunk, dict[str, int]]]:
    """Yields chunks in order, each with its dirt counts, as soon as its parts are on disk."""
    write = partial(_write_chunk, config, staging)
    if workers == 1 or len(chunks) == 1:
        yield from zip(chunks, map(write, chunks), strict=True)
        return
    # Spawned, not forked: the caller may hold threads (Arrow, a JVM gateway).
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(chunks)), mp_context=context) as pool:
        yield from zip(chunks, pool.map(write, chunks), strict=True)


def _write_chunk(config: SampleConfig, staging: Path, chunk: SampleChunk) -> dict[str, int]:
    """Writes the user and rating lines of one chunk; returns its lines of dirt by kind."""
    users, events = draw_chunk(config, chunk)
    share = share_dirt(config, chunk.rows_before, chunk.rows)
    first_unknown = (config.size.users + 1, int(build_world(config).movie_ids.max()) + 1)
    lines = format_ratings(events, share, first_unknown, config.rng(_DIRT_STREAM, chunk.index))
    _part(staging, "ratings", chunk).write_bytes(lines)
    _part(staging, "users", chunk).write_bytes(format_users(users, config, chunk.index))
    return share.count_kinds()


def draw_chunk(config: SampleConfig, chunk: SampleChunk) -> tuple[Users, RatingEvents]:
    """Draws the users of one chunk and all of their events."""
    users = draw_users(config, chunk.users, chunk.index)
    activity = _activity(config)[chunk.users.start : chunk.users.stop]
    rng = config.rng(_EVENT_STREAM, chunk.index)
    return users, draw_events(build_world(config), users, activity, rng)


@lru_cache(maxsize=1)
def build_world(config: SampleConfig) -> Catalogue:
    """Returns the catalogue of a sample, built once per process."""
    return build_catalogue(config)


@lru_cache(maxsize=1)
def _activity(config: SampleConfig) -> Int64s:
    return draw_activity(config)


def format_ratings(
    events: RatingEvents, share: DirtShare, first_unknown: tuple[int, int], rng: np.random.Generator
) -> bytes:
    """Renders a chunk of `ratings.dat`, its dirt mixed in.

    Args:
        events: The valid ratings.
        share: The dirt of this chunk.
        first_unknown: Smallest (user id, movie id) above every known one; the n-th unknown
            line takes the n-th id from there, so that no two are equal.
        rng: The chunk's stream of dirt.

    Returns:
        Lines `UserID::MovieID::Rating::Timestamp`, each ended by a line feed.
    """
    columns = (events.user_ids, events.movie_ids, events.ratings, events.event_ts)
    # Column by column in Arrow: no Python object per rating.
    *texts, stamps = (pa.array(column).cast(pa.string()) for column in columns)
    stamps = pc.binary_join_element_wise(stamps, "\n", "")
    clean = pc.binary_join_element_wise(*texts, stamps, "::")
    count = len(share.malformed) + len(share.unknown)
    source = rng.choice(len(clean), count, replace=False).astype(np.int64)
    fields = np.stack([column[source] for column in columns], 1).tolist()
    extra = [_malform(n, row) for n, row in zip(share.malformed, fields, strict=False)]
    for number, row in zip(share.unknown, fields[len(extra) :], strict=True):
        column = 1 - number % len(UNKNOWN_KINDS)  # turn 0 is the movie, turn 1 the user
        row[column] = first_unknown[column] + number
        extra.append("::".join(map(str, row)) + "\n")
    copied, places = _draw_duplicates(events.user_ids, len(share.duplicates), rng)
    lines = pa.concat_arrays([clean, pa.array(extra, pa.string()), clean.take(pa.array(copied))])
    anchors = np.concatenate([source, places])  # the row before which each extra line goes
    added = np.argsort(anchors, kind="stable")
    order = np.insert(np.arange(len(clean)), anchors[added], added + len(clean))
    merged = lines.take(pa.array(order)) if len(added) else clean
    # The lines of an Arrow array lie end to end in its value buffer: that is the file.
    offsets = np.frombuffer(merged.buffers()[1], dtype=np.int32)
    start, end = offsets[merged.offset], offsets[merged.offset + len(merged)]
    return merged.buffers()[2].slice(int(start), int(end - start)).to_pybytes()


def _malform(number: int, fields: list[int]) -> str:
    texts = [str(field) for field in fields]
    variant, turn = divmod(number, len(MALFORMED_KINDS))
    kind = MALFORMED_KINDS[turn]
    if kind == "empty_line":
        return "\n"
    if kind == "wrong_field_count":
        texts = texts[:3] if variant % 2 == 0 else [*texts, texts[2]]
    elif kind == "non_numeric_id":
        texts[variant % 2] = f"u{texts[0]}" if variant % 2 == 0 else f"{texts[1]}x"
    else:
        texts[2] = str(_BAD_RATINGS[variant % len(_BAD_RATINGS)])
    return "::".join(texts) + "\n"


def _draw_duplicates(
    user_ids: Int64s, count: int, rng: np.random.Generator
) -> tuple[Int64s, Int64s]:
    """Returns the rows to copy, each once, and a place for each copy within its user's rows."""
    copied = rng.choice(len(user_ids), count, replace=False).astype(np.int64)
    low, high = (np.searchsorted(user_ids, user_ids[copied], side) for side in ("left", "right"))
    return copied, low + np.floor(rng.random(count) * (high - low + 1)).astype(np.int64)


def _build_card(
    config: SampleConfig, kinds: Counter[str], staging: Path, chunks: int
) -> dict[str, object]:
    size = config.size
    rows = (size.users, size.movies, size.ratings + kinds.total())
    files = {
        path.name: {"bytes": sum(f.stat().st_size for f in (path, *path.rglob("*")) if f.is_file())}
        for path in sorted(staging.iterdir())
    }
    return {
        "format_version": 1,
        "config": {**asdict(config), "users": size.users, "movies": size.movies},
        "encoding": "latin-1",
        "separator": "::",
        "chunks": chunks,
        "files": files,
        "lines": dict(zip(("users.dat", "movies.dat", "ratings.dat"), rows, strict=True)),
        "ratings": {
            "valid": size.ratings,
            "malformed": {kind: kinds[kind] for kind in MALFORMED_KINDS},
            "unknown": {kind: kinds[kind] for kind in UNKNOWN_KINDS},
            "duplicate": kinds[DUPLICATE],
        },
    }


def _part(staging: Path, name: str, chunk: SampleChunk) -> Path:
    return staging / f".{name}-{chunk.index:05d}"


def _append(target: Path, part: Path) -> None:
    with target.open("ab") as sink:
        sink.write(part.read_bytes())
    part.unlink()
