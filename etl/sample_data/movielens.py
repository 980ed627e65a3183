"""A MovieLens-like sample with dirt: `users.dat`, `movies.dat`, `ratings.dat`, `SAMPLE.json`.

Movies form niches within the genres, users prefer niches by a latent taste that depends on their
attributes and drifts, popularity is Zipfian. The bytes depend on the config (and on NumPy's
generators): users are cut into fixed chunks with random streams of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.sample_data.archive import file_sizes, replace_directory, write_card
from etl.sample_data.config import SampleConfig
from etl.sample_data.ratings import (
    AGE_CODES,
    GENRES,
    USER_STREAM,
    RatingEvents,
    Users,
    build_catalogue,
    build_titles,
    draw_activity,
    draw_events,
    draw_users,
)

CARD_NAME = "SAMPLE.json"
_MALFORMED_KINDS = ("wrong_field_count", "non_numeric_id", "rating_out_of_range", "empty_line")
_UNKNOWN_KINDS = ("unknown_movie", "unknown_user")
_BAD_RATINGS = (0, 6, -1, 11, 99)
_TITLE_STREAM, _EVENT_STREAM, _DIRT_STREAM = 2, 6, 7


class SampleChunk(NamedTuple):
    """One unit of work: some users with all of their ratings."""

    number: int
    users: range  # 0-based
    rows: range  # of the valid ratings of the sample


class DirtShare(NamedTuple):
    """The part of the sample's dirt that falls on one chunk, as ranges of a global count."""

    malformed: range  # the kinds take turns along the range
    unknown: range  # an unknown movie and an unknown user take turns
    duplicates: range

    def count_kinds(self) -> dict[str, Any]:
        """Returns the number of lines of each kind."""
        return {
            "malformed": count_turns(_MALFORMED_KINDS, self.malformed),
            "unknown": count_turns(_UNKNOWN_KINDS, self.unknown),
            "duplicate": len(self.duplicates),
        }


def count_turns(kinds: Sequence[str], numbers: range) -> dict[str, int]:
    """Returns how often each kind comes where the kinds take turns along the numbers."""
    turns = Counter(number % len(kinds) for number in numbers)
    return {kind: turns[turn] for turn, kind in enumerate(kinds)}


def share_dirt(config: SampleConfig, rows: range) -> DirtShare:
    """Splits the exact total of each kind over chunks in proportion to their rows."""
    rates = config.dirt
    each = (rates.dirty, rates.unknown, rates.duplicate)
    return DirtShare(*(share_lines(rate, config.ratings, rows) for rate in each))


def share_lines(rate: float, rows: int, part: range) -> range:
    """Numbers the lines that fall on a part of the rows, of `rate` lines for each of the rows."""
    total = round(rate * rows)
    return range(total * part.start // rows, total * part.stop // rows)


def write_sample(
    config: SampleConfig,
    out_dir: Path,
    *,
    overwrite: bool = False,
    on_ratings: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Generates a sample, of which the config decides every byte.

    `on_ratings` is called with the number of ratings that were written since its last call.

    Returns:
        The content of `SAMPLE.json`: config, files, and the exact number of lines of each kind.

    Raises:
        ConfigError: `out_dir` may not be replaced.
    """
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        chunks = plan_chunks(config)
        (staging / "movies.dat").write_bytes(format_movies(config))
        users, ratings = staging / "users.dat", staging / "ratings.dat"
        with users.open("wb") as user_file, ratings.open("wb") as rating_file:
            for chunk in chunks:
                drawn, events = draw_chunk(config, chunk)
                user_file.write(format_users(drawn, config, chunk))
                rating_file.write(format_ratings(events, config, chunk))
                on_ratings(len(chunk.rows))
        card = _build_card(config, file_sizes(staging), len(chunks))
        write_card(staging / CARD_NAME, card)
    return card


def plan_chunks(config: SampleConfig) -> list[SampleChunk]:
    """Cuts the users into ranges of about `rows_per_chunk` ratings; no user is split."""
    rows_after = np.cumsum(draw_activity(config))
    is_last = np.diff((rows_after - 1) // config.rows_per_chunk, append=-1) != 0
    users = pairwise([0, *(np.flatnonzero(is_last) + 1).tolist()])
    rows = pairwise([0, *rows_after[is_last].tolist()])
    return [
        SampleChunk(number, range(*own_users), range(*own_rows))
        for number, (own_users, own_rows) in enumerate(zip(users, rows, strict=True))
    ]


def draw_chunk(config: SampleConfig, chunk: SampleChunk) -> tuple[Users, RatingEvents]:
    """Draws the users of one chunk and all of their events."""
    users = draw_users(config, chunk.users, chunk.number)
    activity = draw_activity(config)[chunk.users.start : chunk.users.stop]
    rng = config.rng(_EVENT_STREAM, chunk.number)
    return users, draw_events(build_catalogue(config), users, activity, rng)


def format_movies(config: SampleConfig) -> bytes:
    """Renders `movies.dat`: `MovieID::Title (Year)::Genre|Genre`, by id, Latin-1."""
    catalogue = build_catalogue(config)
    genres = [[GENRES[code] for code in codes if code >= 0] for codes in catalogue.genre_codes]
    titles = build_titles([main for main, *_ in genres], config.rng(_TITLE_STREAM))
    lines = _join_fields(catalogue.movie_ids, titles, ["|".join(sorted(own)) for own in genres])
    return _encode(lines[np.argsort(catalogue.movie_ids)])


def format_users(users: Users, config: SampleConfig, chunk: SampleChunk) -> bytes:
    """Renders a chunk of `users.dat`: `UserID::Gender::Age::Occupation::Zip`."""
    rng, count = config.rng(USER_STREAM, chunk.number).spawn(1)[0], len(users.gender)
    codes, extensions = rng.integers(1_000, 100_000, count), rng.integers(1, 10_000, count)
    extended = rng.random(count) < 0.01  # MovieLens has a few ZIP+4 codes
    zips = [
        f"{code:05d}-{extension:04d}" if extend else f"{code:05d}"
        for code, extension, extend in zip(codes, extensions, extended, strict=True)
    ]
    ids, ages = users.first_id + np.arange(count), np.array(AGE_CODES)[users.age]
    genders = np.array(["F", "M"])[users.gender]
    return _encode(_join_fields(ids, genders, ages, users.occupation, zips))


def format_ratings(events: RatingEvents, config: SampleConfig, chunk: SampleChunk) -> bytes:
    """Renders a chunk of `ratings.dat`, dirt mixed in: `UserID::MovieID::Rating::Timestamp`."""
    rng, share = config.rng(_DIRT_STREAM, chunk.number), share_dirt(config, chunk.rows)
    clean, user_ids = _join_fields(*events), events.user_ids
    source = rng.choice(len(clean), len(share.malformed) + len(share.unknown), replace=False)
    rows = [line.split("::") for line in clean[source]]
    extra = [_malform(n, row) for n, row in zip(share.malformed, rows, strict=False)]
    # The n-th unknown line has the n-th id above every known one, so that no two are equal.
    last_known = (config.size.users, int(build_catalogue(config).movie_ids.max()))
    for number, row in zip(share.unknown, rows[len(extra) :], strict=True):
        column = 1 - number % len(_UNKNOWN_KINDS)  # turn 0 is the movie, turn 1 the user
        row[column] = str(last_known[column] + 1 + number)
        extra.append(row)
    # Rows to copy, each once, and a place for each copy within its user's rows.
    copied = rng.choice(len(clean), len(share.duplicates), replace=False)
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


def _join_fields(*columns: Any) -> npt.NDArray[np.object_]:
    """Returns a line per row, `::` between its fields."""
    texts = (pa.array(column).cast(pa.string()) for column in columns)
    lines = pc.binary_join_element_wise(*texts, "::").to_numpy(zero_copy_only=False)
    return np.asarray(lines, dtype=object)


def _encode(lines: npt.NDArray[np.object_]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("latin-1")


def _build_card(config: SampleConfig, files: dict[str, Any], chunks: int) -> dict[str, Any]:
    size, dirt = config.size, share_dirt(config, range(config.ratings))
    rows = (size.users, size.movies, size.ratings + sum(map(len, dirt)))
    return {
        "format_version": 1,
        "config": {**asdict(config), "users": size.users, "movies": size.movies},
        "encoding": "latin-1",
        "separator": "::",
        "chunks": chunks,
        "files": files,
        "lines": dict(zip(("users.dat", "movies.dat", "ratings.dat"), rows, strict=True)),
        "ratings": {"valid": size.ratings, **dirt.count_kinds()},
    }
