"""A sample log of click sequences: `clicks.tsv` and `SAMPLE.json`.

A line is a session: its clicks, oldest first, a tab, and the click that came next. A click is
`<video id>`, or `<video id>_<column id>` where the video stood in a column of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sample_data.archive import replace_directory, write_card
from etl.sample_data.config import MAX_DIRT_RATE, DirtRates, SampleConfig, require_range
from etl.sample_data.movielens import CARD_NAME, SampleChunk, build_world, draw_chunk, plan_chunks
from etl.sample_data.movies import Catalogue
from etl.sample_data.ratings import RatingEvents

CLICKS_NAME = "clicks.tsv"
_CLICKS_PER_SESSION = 8
_COLUMN_SHARE = 0.75  # clicks inside of a column; the others are `<video id>` alone
_OTHER_COLUMN_SHARE = 0.2  # of these, in another column than the one of the video's genre
_COLUMN_STREAM, _MALFORMED_STREAM = 21, 22
_MALFORMED = {"malformed_entry": "{0}__{1}", "missing_value": "_{1}", "empty_entry": ""}


@dataclass(frozen=True)
class ClickSampleConfig:
    """Everything the bytes of a sample of click sequences depend on.

    Args:
        sessions: Number of well-formed sessions, 50 to 10^7; malformed ones come on top.
        videos: Number of videos; None scales it with the sessions.
        seed: Seed of every random stream, >= 0.
        dirty: Sessions with a malformed entry, as a share of the well-formed ones.

    Raises:
        ConfigError: A value is out of range, or the videos are too few for the sessions.
    """

    sessions: int = 10_000
    videos: int | None = None
    seed: int = 7
    dirty: float = 0.001

    def __post_init__(self) -> None:
        require_range("sessions", self.sessions, 50, 10_000_000)
        require_range("dirty_rate", self.dirty, 0, MAX_DIRT_RATE)
        self.events  # noqa: B018 (checks videos and seed)

    @property
    def events(self) -> SampleConfig:
        """The events that sessions are made of: a user is a session."""
        ratings, dirt = self.sessions * _CLICKS_PER_SESSION, DirtRates(0.0, 0.0, 0.0)
        return SampleConfig(ratings, self.sessions, self.videos, self.seed, dirt)


def write_clicks(
    config: ClickSampleConfig, out_dir: Path, *, overwrite: bool = False
) -> dict[str, object]:
    """Generates a log of click sequences into a directory that appears complete or not at all.

    Args:
        config: Size, seed and dirt; decides every byte.
        out_dir: Directory to create.
        overwrite: Whether an earlier sample in `out_dir` may be replaced.

    Returns:
        The content of `SAMPLE.json`: config, and the exact number of lines of each kind.

    Raises:
        ConfigError: `out_dir` may not be replaced.
        InternalError: The file system refused.
    """
    malformed = dict.fromkeys(_MALFORMED, 0)
    with replace_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
        with (staging / CLICKS_NAME).open("w", encoding="ascii") as out:
            for chunk in plan_chunks(config.events):
                lines = _format_sessions(config.events, chunk)
                for reason in _mix_in_malformed(lines, config, chunk):
                    malformed[reason] += 1
                out.writelines(f"{line}\n" for line in lines)
        card: dict[str, object] = {
            "format_version": 1,
            "config": {
                "sessions": config.sessions,
                "videos": config.events.size.movies,
                "seed": config.seed,
                "dirty": config.dirty,
            },
            "lines": {CLICKS_NAME: config.sessions + sum(malformed.values())},
            "sessions": {"valid": config.sessions, "malformed": malformed},
        }
        write_card(staging / CARD_NAME, card)
    return card


def _format_sessions(config: SampleConfig, chunk: SampleChunk) -> list[str]:
    """The lines of a chunk, without line feeds: a session each, in the order of its users."""
    events = draw_chunk(config, chunk)[1]
    clicks = _format_clicks(events, build_world(config), config.rng(_COLUMN_STREAM, chunk.index))
    clicks = clicks.take(pa.array(np.lexsort((events.event_ts, events.user_ids))))
    # A session's clicks but the last are what came before; a click of each begins the next.
    is_last = np.append(np.diff(events.user_ids) != 0, True)
    ends = np.flatnonzero(is_last) - np.arange(is_last.sum())
    before = pa.ListArray.from_arrays(
        pa.array(np.append(0, ends).astype(np.int32)), clicks.filter(pa.array(~is_last))
    )
    last = clicks.filter(pa.array(is_last))
    return pc.binary_join_element_wise(pc.binary_join(before, " "), last, "\t").to_pylist()


def _format_clicks(
    events: RatingEvents, catalogue: Catalogue, rng: np.random.Generator
) -> pa.Array:
    """`<video>` or `<video>_<column>` of each event; the column is mostly that of the genre."""
    by_id = np.argsort(catalogue.movie_ids)
    video = by_id[np.searchsorted(catalogue.movie_ids, events.movie_ids, sorter=by_id)]
    column = catalogue.genre_codes[video, 0] + 1
    elsewhere = rng.random(len(video)) < _OTHER_COLUMN_SHARE
    column[elsewhere] = rng.integers(1, int(column.max()) + 1, int(elsewhere.sum()))
    ids = pa.array(events.movie_ids).cast(pa.string())
    with_column = pc.binary_join_element_wise(ids, pa.array(column).cast(pa.string()), "_")
    return pc.if_else(pa.array(rng.random(len(video)) < _COLUMN_SHARE), with_column, ids)


def _mix_in_malformed(lines: list[str], config: ClickSampleConfig, chunk: SampleChunk) -> list[str]:
    """Puts sessions with a malformed first entry between the others; returns their reasons."""
    total, kinds = round(config.dirty * config.sessions), list(_MALFORMED)
    first, last = (total * n // config.sessions for n in (chunk.users.start, chunk.users.stop))
    rng = config.events.rng(_MALFORMED_STREAM, chunk.index)
    reasons = [kinds[number % len(kinds)] for number in range(first, last)]
    for reason in reasons:
        place = int(rng.integers(len(lines)))
        video, column = (int(n) for n in rng.integers(1, 1000, 2))
        lines.insert(place, f"{_MALFORMED[reason].format(video, column)} {lines[place]}")
    return reasons
