"""A sample log of click sequences: `clicks.tsv` and `SAMPLE.json`.

A line is a session: its clicks, oldest first, a tab, and the click that came next. A click is
`<video id>`, or `<video id>_<column id>` where the video stood in a column of the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from etl.sample_data.archive import replace_directory, write_card
from etl.sample_data.config import DirtRates, SampleConfig
from etl.sample_data.movielens import (
    CARD_NAME,
    SampleChunk,
    count_turns,
    draw_chunk,
    plan_chunks,
    share_lines,
)
from etl.sample_data.ratings import RatingEvents, build_catalogue

CLICKS_NAME = "clicks.tsv"
_CLICKS_PER_SESSION = 8
_COLUMN_SHARE = 0.75  # clicks inside of a column; the others are `<video id>` alone
_OTHER_COLUMN_SHARE = 0.2  # of these, in another column than the one of the video's genre
_COLUMN_STREAM, _MALFORMED_STREAM = 21, 22
_MALFORMED = {"malformed_entry": "{0}__{1}", "missing_value": "_{1}", "empty_entry": ""}


def plan_clicks(
    sessions: int = 10_000, videos: int | None = None, seed: int = 7, dirty: float = 0.001
) -> SampleConfig:
    """Returns the events that sessions are made of: a user is a session, a movie a video.

    `dirty` is the share of sessions with a malformed entry, on top of the well-formed ones.
    """
    dirt = DirtRates(dirty, duplicate=0.0, unknown=0.0)
    return SampleConfig(sessions * _CLICKS_PER_SESSION, sessions, videos, seed, dirt)


def write_clicks(config: SampleConfig, out_dir: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Generates the sample that `plan_clicks` describes, which decides every byte.

    Returns:
        The content of `SAMPLE.json`: config, and the exact number of lines of each kind.

    Raises:
        ConfigError: `out_dir` may not be replaced.
    """
    size, dirty = config.size, config.dirt.dirty
    malformed = _number_malformed(config, range(size.users))
    used = {"sessions": size.users, "videos": size.movies, "seed": config.seed, "dirty": dirty}
    counts = count_turns(tuple(_MALFORMED), malformed)
    card: dict[str, Any] = {
        "format_version": 1,
        "config": used,
        "lines": {CLICKS_NAME: size.users + len(malformed)},
        "sessions": {"valid": size.users, "malformed": counts},
    }
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        with (staging / CLICKS_NAME).open("w", encoding="ascii") as out:
            for chunk in plan_chunks(config):
                lines = _format_sessions(config, chunk)
                _mix_in_malformed(lines, config, chunk)
                out.writelines(f"{line}\n" for line in lines)
        write_card(staging / CARD_NAME, card)
    return card


def _format_sessions(config: SampleConfig, chunk: SampleChunk) -> list[str]:
    """The lines of a chunk, without line feeds: a session each, in the order of its users."""
    events = draw_chunk(config, chunk)[1]
    clicks = np.array(_format_clicks(config, chunk, events), dtype=object)
    clicks = clicks[np.lexsort((events.event_ts, events.user_ids))]
    sessions = np.split(clicks, np.flatnonzero(np.diff(events.user_ids)) + 1)
    return [f"{' '.join(before)}\t{last}" for *before, last in sessions]


def _format_clicks(config: SampleConfig, chunk: SampleChunk, events: RatingEvents) -> list[str]:
    """`<video>` or `<video>_<column>` of each event; the column is mostly that of the genre."""
    catalogue, rng = build_catalogue(config), config.rng(_COLUMN_STREAM, chunk.number)
    genres = np.zeros(catalogue.movie_ids.max() + 1, dtype=np.int64)
    genres[catalogue.movie_ids] = catalogue.genre_codes[:, 0]
    column = genres[events.movie_ids] + 1
    elsewhere = rng.random(len(column)) < _OTHER_COLUMN_SHARE
    column[elsewhere] = rng.integers(1, int(column.max()) + 1, int(elsewhere.sum()))
    inside = rng.random(len(column)) < _COLUMN_SHARE
    clicks = zip(events.movie_ids.tolist(), column.tolist(), inside.tolist(), strict=True)
    return [f"{video}_{place}" if is_inside else str(video) for video, place, is_inside in clicks]


def _mix_in_malformed(lines: list[str], config: SampleConfig, chunk: SampleChunk) -> None:
    """Puts sessions with a malformed first entry between the others."""
    rng, entries = config.rng(_MALFORMED_STREAM, chunk.number), list(_MALFORMED.values())
    for number in _number_malformed(config, chunk.users):
        place = int(rng.integers(len(lines)))
        entry = entries[number % len(entries)].format(*rng.integers(1, 1000, 2))
        lines.insert(place, f"{entry} {lines[place]}")


def _number_malformed(config: SampleConfig, sessions: range) -> range:
    """The malformed sessions that fall on some of the well-formed ones; their kinds take turns."""
    return share_lines(config.dirt.dirty, config.size.users, sessions)
