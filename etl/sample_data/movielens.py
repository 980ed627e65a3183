"""A MovieLens-like sample with dirt: `users.dat`, `movies.dat`, `ratings.dat`, `SAMPLE.json`.

Movies form niches within the genres, users prefer niches by a latent taste that depends on their
attributes and drifts, popularity is Zipfian. The bytes depend on the config (and on NumPy's
generators), never on the number of workers: users are cut into fixed chunks with random streams
of their own.
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
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError
from etl.sample_data.archive import stage_directory
from etl.sample_data.config import SampleConfig
from etl.sample_data.movies import Catalogue, build_catalogue, format_movies
from etl.sample_data.ratings import (
    RatingEvents,
    Users,
    build_effects,
    draw_activity,
    draw_events,
    draw_users,
    format_users,
)

MALFORMED_KINDS = ("wrong_field_count", "non_numeric_id", "rating_out_of_range", "empty_line")
UNKNOWN_KINDS = ("unknown_movie", "unknown_user")
DUPLICATE = "duplicate"
KINDS = (*MALFORMED_KINDS, *UNKNOWN_KINDS, DUPLICATE)
_BAD_RATINGS = (0, 6, -1, 11, 99)


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
        """Returns the number of lines of each kind, keyed by `KINDS`."""
        counts = {DUPLICATE: len(self.duplicates)}
        for kinds, numbers in ((MALFORMED_KINDS, self.malformed), (UNKNOWN_KINDS, self.unknown)):
            for turn, kind in enumerate(kinds):
                counts[kind] = sum(1 for n in numbers if n % len(kinds) == turn)
        return {kind: counts[kind] for kind in KINDS}


def share_dirt(config: SampleConfig, rows_before: int, rows: int) -> DirtShare:
    """Splits the exact total of each kind over chunks in proportion to their rows."""

    def part(rate: float) -> range:
        total = round(rate * config.ratings)
        return range(
            total * rows_before // config.ratings, total * (rows_before + rows) // config.ratings
        )

    dirt = config.dirt
    return DirtShare(part(dirt.dirty), part(dirt.unknown), part(dirt.duplicate))


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
    clean = _join_fields(events)
    extra, anchor = _draw_extra_lines(events, share, first_unknown, rng)
    copied, copy_anchor = _draw_duplicates(events, len(share.duplicates), rng)
    lines = pa.concat_arrays([clean, pa.array(extra, pa.string()), clean.take(pa.array(copied))])
    anchors = np.concatenate([anchor, copy_anchor])
    added = np.argsort(anchors, kind="stable")
    order = np.insert(np.arange(len(clean)), anchors[added], added + len(clean))
    merged = lines.take(pa.array(order)) if len(added) else clean
    return _text_of(merged)


def _text_of(lines: pa.Array) -> bytes:
    # The lines of an Arrow array lie end to end in its value buffer: that is the file.
    offsets = np.frombuffer(lines.buffers()[1], dtype=np.int32)
    start, end = offsets[lines.offset], offsets[lines.offset + len(lines)]
    return lines.buffers()[2].slice(int(start), int(end - start)).to_pybytes()


def _join_fields(events: RatingEvents) -> pa.Array:
    # Column by column in Arrow: no Python object per rating.
    stamps = pc.binary_join_element_wise(pa.array(events.event_ts).cast(pa.string()), "\n", "")
    columns = (events.user_ids, events.movie_ids, events.ratings)
    return pc.binary_join_element_wise(
        *(pa.array(column).cast(pa.string()) for column in columns), stamps, "::"
    )


def _draw_extra_lines(
    events: RatingEvents, share: DirtShare, first_unknown: tuple[int, int], rng: np.random.Generator
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Returns the malformed and unknown-id lines and the row before which each goes."""
    rows = len(events.user_ids)
    source = rng.choice(rows, len(share.malformed) + len(share.unknown), replace=False)
    lines: list[str] = []
    for number, row in zip((*share.malformed, *share.unknown), source.tolist(), strict=True):
        fields = [
            int(column[row])
            for column in (events.user_ids, events.movie_ids, events.ratings, events.event_ts)
        ]
        position = len(lines)
        if position < len(share.malformed):
            lines.append(_malform(number, fields))
        else:
            column = 1 - number % len(UNKNOWN_KINDS)  # turn 0 is the movie, turn 1 the user
            fields[column] = first_unknown[column] + number
            lines.append("::".join(map(str, fields)) + "\n")
    return lines, source.astype(np.int64)


def _malform(number: int, fields: list[int]) -> str:
    texts = [str(field) for field in fields]
    kind = MALFORMED_KINDS[number % len(MALFORMED_KINDS)]
    variant = number // len(MALFORMED_KINDS)
    if kind == "empty_line":
        return "\n"
    if kind == "wrong_field_count":
        texts = texts[:3] if variant % 2 == 0 else [*texts, texts[2]]
    elif kind == "non_numeric_id":
        column = variant % 2
        texts[column] = f"u{texts[0]}" if column == 0 else f"{texts[1]}x"
    else:
        texts[2] = str(_BAD_RATINGS[variant % len(_BAD_RATINGS)])
    return "::".join(texts) + "\n"


def _draw_duplicates(
    events: RatingEvents, count: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the rows to copy, each once, and a place for each copy within its user's rows."""
    copied = rng.choice(len(events.user_ids), count, replace=False).astype(np.int64)
    users = events.user_ids[copied]
    low = np.searchsorted(events.user_ids, users, side="left")
    high = np.searchsorted(events.user_ids, users, side="right")
    return copied, low + np.floor(rng.random(count) * (high - low + 1)).astype(np.int64)


CARD_NAME = "SAMPLE.json"
MAX_SINGLE_FILE_RATINGS = 10_000_000
_EVENT_STREAM, _DIRT_STREAM = 6, 7


@dataclass(frozen=True)
class SampleChunk:
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


def plan_chunks(config: SampleConfig) -> list[SampleChunk]:
    """Cuts the users into ranges of about `rows_per_chunk` ratings; no user is split."""
    rows_after = np.cumsum(_activity(config))
    number = (rows_after - 1) // config.rows_per_chunk
    last = np.flatnonzero(np.append(number[1:] != number[:-1], True))
    chunks: list[SampleChunk] = []
    user, rows = 0, 0
    for index, end in enumerate(last.tolist()):
        total = int(rows_after[end])
        chunks.append(SampleChunk(index, range(user, end + 1), total - rows, rows))
        user, rows = end + 1, total
    return chunks


def _run_chunks(
    config: SampleConfig, chunks: list[SampleChunk], staging: Path, workers: int
) -> Iterator[tuple[SampleChunk, dict[str, int]]]:
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


def write_chunk(config: SampleConfig, chunk: SampleChunk, staging: Path) -> dict[str, int]:
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


def draw_chunk(config: SampleConfig, chunk: SampleChunk) -> tuple[Users, RatingEvents]:
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
