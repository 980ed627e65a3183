"""Dirt mixed into the ratings: malformed lines, exact duplicates and unknown ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.samples.config import SampleConfig
from etl.samples.interactions import Events

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
    events: Events, share: DirtShare, first_unknown: tuple[int, int], rng: np.random.Generator
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


def _join_fields(events: Events) -> pa.Array:
    # Column by column in Arrow: no Python object per rating.
    stamps = pc.binary_join_element_wise(pa.array(events.event_ts).cast(pa.string()), "\n", "")
    columns = (events.user_ids, events.movie_ids, events.ratings)
    return pc.binary_join_element_wise(
        *(pa.array(column).cast(pa.string()) for column in columns), stamps, "::"
    )


def _draw_extra_lines(
    events: Events, share: DirtShare, first_unknown: tuple[int, int], rng: np.random.Generator
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
    events: Events, count: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the rows to copy, each once, and a place for each copy within its user's rows."""
    copied = rng.choice(len(events.user_ids), count, replace=False).astype(np.int64)
    users = events.user_ids[copied]
    low = np.searchsorted(events.user_ids, users, side="left")
    high = np.searchsorted(events.user_ids, users, side="right")
    return copied, low + np.floor(rng.random(count) * (high - low + 1)).astype(np.int64)
