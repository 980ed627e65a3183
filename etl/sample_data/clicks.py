"""A sample log of click sequences: `clicks.tsv` and `SAMPLE.json`.

A line is a session: its clicks, oldest first, a tab, and the click that came next. A click is
`<video id>`, or `<video id>_<column id>` where the video stood in a column of the page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError
from etl.sample_data.archive import stage_directory
from etl.sample_data.config import MAX_DIRT_RATE, DirtRates, SampleConfig
from etl.sample_data.movielens import CARD_NAME, SampleChunk, draw_chunk, plan_chunks, world_of
from etl.sample_data.movies import Catalogue
from etl.sample_data.ratings import RatingEvents

CLICKS_NAME = "clicks.tsv"
CLICKS_PER_SESSION = 8
MIN_SESSIONS = 50
MAX_SESSIONS = 10_000_000
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
        if not MIN_SESSIONS <= self.sessions <= MAX_SESSIONS:
            raise ConfigError(
                "sessions is out of range",
                received=self.sessions,
                allowed=f"{MIN_SESSIONS} to {MAX_SESSIONS}",
                fix="pass --sessions within these bounds",
            )
        if not 0.0 <= self.dirty <= MAX_DIRT_RATE:
            raise ConfigError(
                "the dirty rate is out of range",
                received=self.dirty,
                allowed=f"0 to {MAX_DIRT_RATE}",
                fix="pass a smaller --dirty-rate",
            )
        self.events  # noqa: B018 (checks videos and seed)

    @property
    def events(self) -> SampleConfig:
        """The events that sessions are made of: a user is a session."""
        return SampleConfig(
            ratings=self.sessions * CLICKS_PER_SESSION,
            users=self.sessions,
            movies=self.videos,
            seed=self.seed,
            dirt=DirtRates(0.0, 0.0, 0.0),
        )


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
    with stage_directory(out_dir, CARD_NAME, overwrite=overwrite) as staging:
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
        (staging / CARD_NAME).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return card


def _format_sessions(config: SampleConfig, chunk: SampleChunk) -> list[str]:
    """The lines of a chunk, without line feeds: a session each, in the order of its users."""
    events = draw_chunk(config, chunk)[1]
    order = np.lexsort((events.event_ts, events.user_ids))
    clicks = _format_clicks(events, world_of(config), config.rng(_COLUMN_STREAM, chunk.index))
    clicks = clicks.take(pa.array(order))
    ends = np.flatnonzero(np.append(np.diff(events.user_ids) != 0, True)) + 1
    starts = np.concatenate(([0], ends[:-1]))
    # A session's clicks but the last are what came before; a click of each begins the next.
    is_last = np.zeros(len(order), np.bool_)
    is_last[ends - 1] = True
    sizes = ends - starts - 1
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    before = pa.ListArray.from_arrays(pa.array(offsets), clicks.filter(pa.array(~is_last)))
    lines = pc.binary_join_element_wise(
        pc.binary_join(before, " "), clicks.filter(pa.array(is_last)), "\t"
    )
    return lines.to_pylist()


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
    total = round(config.dirty * config.sessions)
    first = total * chunk.users.start // config.sessions
    last = total * chunk.users.stop // config.sessions
    rng = config.events.rng(_MALFORMED_STREAM, chunk.index)
    kinds = list(_MALFORMED)
    reasons = [kinds[number % len(kinds)] for number in range(first, last)]
    for reason in reasons:
        place = int(rng.integers(len(lines)))
        video, column = (int(n) for n in rng.integers(1, 1000, 2))
        entry = _MALFORMED[reason].format(video, column)
        lines.insert(place, f"{entry} {lines[place]}")
    return reasons
