"""The files of a sample: MovieLens-like ratings, or sessions of clicks, and `SAMPLE.json`.

Dirt is mixed in, of which each line is counted. The config decides every byte (with NumPy's
generators): users are cut into fixed chunks with random streams of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sample_data.archive import file_sizes, replace_directory, write_card
from etl.sample_data.ratings import (
    AGE_CODES,
    GENRES,
    USER_STREAM,
    DirtRates,
    RatingEvents,
    SampleConfig,
    Users,
    build_catalogue,
    build_titles,
    draw_activity,
    draw_events,
    draw_users,
    plan_sample,
)

CARD_NAME, CLICKS_NAME = "SAMPLE.json", "clicks.tsv"
_MALFORMED_KINDS = ("wrong_field_count", "non_numeric_id", "rating_out_of_range", "empty_line")
_UNKNOWN_KINDS = ("unknown_movie", "unknown_user")
_BAD_RATINGS = (0, 6, -1, 11, 99)
_TITLE_STREAM, _EVENT_STREAM, _DIRT_STREAM = 2, 6, 7


class SampleChunk(NamedTuple):
    """Some users with all of their ratings."""

    number: int
    users: Users
    events: RatingEvents
    rows: range  # of the valid ratings of the sample


def draw_chunks(config: SampleConfig) -> Iterator[SampleChunk]:
    """Draws the users in ranges of about `rows_per_chunk` ratings; no user is split."""
    activity = draw_activity(config)
    rows_after = np.cumsum(activity)
    is_last = np.diff((rows_after - 1) // config.rows_per_chunk, append=-1) != 0
    ends = np.column_stack((np.flatnonzero(is_last) + 1, rows_after[is_last])).tolist()
    for number, ((user, row), (last, end)) in enumerate(pairwise([[0, 0], *ends])):
        users = draw_users(config, range(user, last), number)
        rng = config.rng(_EVENT_STREAM, number)
        events = draw_events(build_catalogue(config), users, activity[user:last], rng)
        yield SampleChunk(number, users, events, range(row, end))


def write_sample(
    config: SampleConfig,
    out_dir: Path,
    *,
    overwrite: bool = False,
    on_ratings: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes `users.dat`, `movies.dat` and `ratings.dat`; returns the content of `SAMPLE.json`.

    `on_ratings` is called with the number of ratings that were written since its last call.
    """
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        (staging / "movies.dat").write_bytes(format_movies(config))
        users, ratings = staging / "users.dat", staging / "ratings.dat"
        with users.open("wb") as user_file, ratings.open("wb") as rating_file:
            for chunk in draw_chunks(config):
                user_file.write(format_users(chunk, config))
                rating_file.write(format_ratings(chunk, config))
                on_ratings(len(chunk.rows))
        card = _build_card(config, file_sizes(staging), chunk.number + 1)
        write_card(staging / CARD_NAME, card)
    return card


def _build_card(config: SampleConfig, files: dict[str, Any], chunks: int) -> dict[str, Any]:
    dirt = share_dirt(config, range(config.ratings))
    ratings = config.ratings + sum(map(len, dirt.values()))
    return {
        "format_version": 1,
        "config": asdict(config),
        "encoding": "latin-1",
        "separator": "::",
        "chunks": chunks,
        "files": files,
        "lines": {"users.dat": config.users, "movies.dat": config.movies, "ratings.dat": ratings},
        "ratings": {
            "valid": config.ratings,
            "malformed": _count_turns(_MALFORMED_KINDS, dirt["malformed"]),
            "unknown": _count_turns(_UNKNOWN_KINDS, dirt["unknown"]),
            "duplicate": len(dirt["duplicate"]),
        },
    }


def share_dirt(config: SampleConfig, rows: range) -> dict[str, range]:
    """The dirt that falls on some ratings, numbered over the sample; kinds take turns by number."""
    rates = config.dirt
    each = {"malformed": rates.dirty, "unknown": rates.unknown, "duplicate": rates.duplicate}
    return {kind: _share_lines(rate, config.ratings, rows) for kind, rate in each.items()}


def _share_lines(rate: float, rows: int, part: range) -> range:
    """Of `rate` lines for each of the rows, the numbers of those that fall on a part of them."""
    total = round(rate * rows)
    return range(total * part.start // rows, total * part.stop // rows)


def _count_turns(kinds: Sequence[str], numbers: range) -> dict[str, int]:
    turns = Counter(number % len(kinds) for number in numbers)
    return {kind: turns[turn] for turn, kind in enumerate(kinds)}


def format_movies(config: SampleConfig) -> bytes:
    """`MovieID::Title (Year)::Genre|Genre`, by id, in Latin-1."""
    catalogue = build_catalogue(config)
    genres = [[GENRES[code] for code in codes if code >= 0] for codes in catalogue.genre_codes]
    titles = build_titles([main for main, *_ in genres], config.rng(_TITLE_STREAM))
    lines = _join_fields(catalogue.movie_ids, titles, ["|".join(sorted(own)) for own in genres])
    return _encode(lines[np.argsort(catalogue.movie_ids)])


def format_users(chunk: SampleChunk, config: SampleConfig) -> bytes:
    """`UserID::Gender::Age::Occupation::Zip`."""
    users, rng = chunk.users, config.rng(USER_STREAM, chunk.number).spawn(1)[0]
    count = len(users.gender)
    codes, extensions = rng.integers(1_000, 100_000, count), rng.integers(1, 10_000, count)
    is_extended = rng.random(count) < 0.01  # MovieLens has a few ZIP+4 codes
    zips = [
        f"{code:05d}-{extension:04d}" if extends else f"{code:05d}"
        for code, extension, extends in zip(codes, extensions, is_extended, strict=True)
    ]
    ids, ages = users.first_id + np.arange(count), np.array(AGE_CODES)[users.age]
    genders = np.array(["F", "M"])[users.gender]
    return _encode(_join_fields(ids, genders, ages, users.occupation, zips))


def format_ratings(chunk: SampleChunk, config: SampleConfig) -> bytes:
    """`UserID::MovieID::Rating::Timestamp`, dirt mixed in."""
    rng, dirt = config.rng(_DIRT_STREAM, chunk.number), share_dirt(config, chunk.rows)
    clean, user_ids = _join_fields(*chunk.events), chunk.events.user_ids
    # A line to spoil for each, once; rounded shares of a chunk may ask for one more than it has.
    spoiled = len(dirt["malformed"]) + len(dirt["unknown"])
    chosen = rng.choice(len(clean), min(spoiled, len(clean)), replace=False)
    source = np.resize(chosen, spoiled)
    rows = [line.split("::") for line in clean[source]]
    extra = [_malform(n, row) for n, row in zip(dirt["malformed"], rows, strict=False)]
    # The n-th unknown line has the n-th id above every known one, so that no two are equal.
    last_known = (config.users, int(build_catalogue(config).movie_ids.max()))
    for number, row in zip(dirt["unknown"], rows[len(extra) :], strict=True):
        column = 1 - number % len(_UNKNOWN_KINDS)  # turn 0 is the movie, turn 1 the user
        row[column] = str(last_known[column] + 1 + number)
        extra.append(row)
    # Rows to copy, each once, and a place for each copy within its user's rows.
    copied = rng.choice(len(clean), len(dirt["duplicate"]), replace=False)
    low, high = (np.searchsorted(user_ids, user_ids[copied], side) for side in ("left", "right"))
    places = low + np.floor(rng.random(len(copied)) * (high - low + 1)).astype(np.int64)
    added = np.array([*map("::".join, extra), *clean[copied]], dtype=object)
    return _encode(np.insert(clean, np.concatenate([source, places]), added))


def _malform(number: int, fields: list[str]) -> list[str]:
    variant, turn = divmod(number, len(_MALFORMED_KINDS))
    user, movie, rating, stamp = fields
    match _MALFORMED_KINDS[turn]:
        case "wrong_field_count":
            return [user, movie, rating] if variant % 2 == 0 else [*fields, rating]
        case "non_numeric_id":
            ids = [f"u{user}", movie] if variant % 2 == 0 else [user, f"{movie}x"]
            return [*ids, rating, stamp]
        case "rating_out_of_range":
            return [user, movie, str(_BAD_RATINGS[variant % len(_BAD_RATINGS)]), stamp]
    return []  # an empty line


def _join_fields(*columns: Any) -> np.ndarray:
    """A line per row, `::` between its fields."""
    texts = (pa.array(column).cast(pa.string()) for column in columns)
    return pc.binary_join_element_wise(*texts, "::").to_numpy(zero_copy_only=False)


def _encode(lines: np.ndarray) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("latin-1")


_CLICKS_PER_SESSION = 8
_COLUMN_SHARE = 0.75  # clicks inside of a column; the others are `<video id>` alone
_OTHER_COLUMN_SHARE = 0.2  # of these, in another column than the one of the video's genre
_COLUMN_STREAM, _MALFORMED_STREAM = 21, 22
_MALFORMED_ENTRIES = {"malformed_entry": "{0}__{1}", "missing_value": "_{1}", "empty_entry": ""}


def plan_clicks(
    sessions: int = 10_000, videos: int | None = None, seed: int = 7, dirty: float = 0.001
) -> SampleConfig:
    """Returns the events that sessions are made of: a user is a session, a movie a video.

    `dirty` is the share of sessions with a malformed entry, on top of the well-formed ones.
    """
    dirt = DirtRates(dirty, duplicate=0.0, unknown=0.0)
    return plan_sample(sessions * _CLICKS_PER_SESSION, sessions, videos, seed, dirt)


def write_clicks(config: SampleConfig, out_dir: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Writes the `clicks.tsv` of `plan_clicks`; returns the content of `SAMPLE.json`.

    A line is a session: its clicks, oldest first, a tab, and the click that came next. A click is
    `<video id>`, or `<video id>_<column id>` where the video stood in a column of the page.
    """
    malformed = _share_lines(config.dirt.dirty, config.users, range(config.users))
    card: dict[str, Any] = {
        "format_version": 1,
        "config": {
            "sessions": config.users,
            "videos": config.movies,
            "seed": config.seed,
            "dirty": config.dirt.dirty,
        },
        "lines": {CLICKS_NAME: config.users + len(malformed)},
        "sessions": {
            "valid": config.users,
            "malformed": _count_turns(tuple(_MALFORMED_ENTRIES), malformed),
        },
    }
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        with (staging / CLICKS_NAME).open("w", encoding="ascii") as out:
            for chunk in draw_chunks(config):
                lines = _format_sessions(chunk, config)
                _mix_in_malformed(lines, chunk, config)
                out.writelines(f"{line}\n" for line in lines)
        write_card(staging / CARD_NAME, card)
    return card


def _format_sessions(chunk: SampleChunk, config: SampleConfig) -> list[str]:
    """A line of each user, without line feed."""
    events = chunk.events
    clicks = np.array(_format_clicks(chunk, config), dtype=object)
    clicks = clicks[np.lexsort((events.event_ts, events.user_ids))]
    sessions = np.split(clicks, np.flatnonzero(np.diff(events.user_ids)) + 1)
    return [f"{' '.join(before)}\t{last}" for *before, last in sessions]


def _format_clicks(chunk: SampleChunk, config: SampleConfig) -> list[str]:
    """`<video>` or `<video>_<column>` of each event; the column is mostly that of the genre."""
    catalogue, rng = build_catalogue(config), config.rng(_COLUMN_STREAM, chunk.number)
    videos = chunk.events.movie_ids
    genres = np.zeros(catalogue.movie_ids.max() + 1, dtype=np.int64)
    genres[catalogue.movie_ids] = catalogue.genre_codes[:, 0]
    column = genres[videos] + 1
    is_elsewhere = rng.random(len(column)) < _OTHER_COLUMN_SHARE
    column[is_elsewhere] = rng.integers(1, int(column.max()) + 1, int(is_elsewhere.sum()))
    is_inside = rng.random(len(column)) < _COLUMN_SHARE
    clicks = zip(videos.tolist(), column.tolist(), is_inside.tolist(), strict=True)
    return [f"{video}_{place}" if inside else str(video) for video, place, inside in clicks]


def _mix_in_malformed(sessions: list[str], chunk: SampleChunk, config: SampleConfig) -> None:
    """Puts sessions with a malformed first entry between the others."""
    rng, entries = config.rng(_MALFORMED_STREAM, chunk.number), list(_MALFORMED_ENTRIES.values())
    first = chunk.users.first_id - 1
    here = range(first, first + len(sessions))
    for number in _share_lines(config.dirt.dirty, config.users, here):
        place = int(rng.integers(len(sessions)))
        entry = entries[number % len(entries)].format(*rng.integers(1, 1000, 2))
        sessions.insert(place, f"{entry} {sessions[place]}")
