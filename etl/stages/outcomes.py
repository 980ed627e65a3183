"""Accounts of a build: every event that was read has one outcome, a record or a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conf.errors import InputDataError, InternalError
from conf.etl.build import BuildConfig
from conf.manifest import RowCounts, SplitInfo
from etl.events.event_counts import EventCounts
from etl.events.joins import MATCHED
from etl.sources.bad_rows import SourceCounts

HISTORY_TOO_SHORT = "history_too_short"


def count_outcomes(
    config: BuildConfig,
    counts: Mapping[str, SourceCounts],
    events: EventCounts,
    splits: Sequence[SplitInfo],
    drawn: Mapping[str, int] | None = None,
) -> RowCounts:
    """Accounts for every event, and for every negative that was drawn.

    Args:
        config: The build's config.
        counts: Rows of each source.
        events: Events kept as samples and dropped.
        splits: What was written.
        drawn: Negatives by split.

    Raises:
        InternalError: Fewer or more records were written than events were kept.
        InputDataError: A split has no sample left.
    """
    written = {split.name: split.rows for split in splits}
    drawn = drawn or {}
    short = {s: n + drawn.get(s, 0) - written[s] for s, n in events.splits.items()}
    filtered = config.history is not None and config.history.min_len is not None
    if min(short.values(), default=0) < 0 or (any(short.values()) and not filtered):
        raise InternalError(
            "the number of records written is not the number of events kept",
            received=written,
            allowed=events.splits,
            fix="nothing was published; run again, and report this if it stays",
        )
    empty = [split for split in events.splits if not written[split]]
    if empty:
        raise InputDataError(
            f"no sample of the {' and the '.join(empty)} split has a history long enough",
            received=f"kept {written}",
            fix="lower history.min_len",
        )
    too_short = sum(short.values())
    dropped = {**events.dropped, **({HISTORY_TOO_SHORT: too_short} if too_short else {})}
    return RowCounts(
        read={name: count.read for name, count in counts.items()},
        quarantined={name: count.bad for name, count in counts.items()},
        joined=events.joined,
        kept=written,
        dropped=dropped,
        drawn=drawn,
        unmatched=events.unmatched,
        lost_conversions=events.lost_conversions,
        matched={name: counts[MATCHED] for name, counts in events.matches.items()},
        maturity=events.maturity,
    )
