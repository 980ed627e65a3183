"""What the manifest says of a build: its rows, records, features and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.errors import InternalError, read_code_version
from conf.etl.build import BuildConfig
from conf.manifest import Manifest, RowCounts
from conf.splits import EVENT_SPLITS
from etl.encoders.feature_plan import FeaturePlan
from etl.events.event_counts import EventCounts
from etl.events.joins import MATCHED
from etl.quality.statistics import count_labelled
from etl.records.fitted_encoders import FittedEncoders
from etl.records.version_records import WrittenRecords
from etl.sources.bad_rows import SourceCounts


@dataclass(frozen=True)
class BuiltVersion:
    """What a build has counted and written.

    Attributes:
        sources: Rows of each source.
        events: Events kept as samples and dropped.
        encoders: The encoders.
        drawn: Negatives that were drawn, by split.
        written: The records.
    """

    sources: Mapping[str, SourceCounts]
    events: EventCounts
    encoders: FittedEncoders
    drawn: Mapping[str, int]
    written: WrittenRecords


def describe_version(
    config: BuildConfig, features: FeaturePlan, built: BuiltVersion
) -> dict[str, Any]:
    """Returns the fields of the manifest that follow from the rows.

    Raises:
        InternalError: Fewer or more records were written than events were kept.
    """
    encoders, written, keys = built.encoders, built.written, features.keys
    return {
        "dataset_name": config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "record_type": config.output.record_type,
        "compression": config.output.compression,
        "keys": keys,
        "code_version": read_code_version(),
        "counts": _count_rows(built),
        "splits": written.splits,
        "schema": encoders.plan.schema,
        "encoder_files": encoders.files,
        "encoders_fingerprint": encoders.plan.fingerprint,
        "vocabularies": encoders.tokens,
        "statistics": written.statistics,
        "statistics_file": written.statistics_file,
        "label_rate": _label_rate(keys.label, written),
        "label_rates": {
            label.name: _label_rate(label.name, written)
            for label in config.further_labels
            if label.is_binary
        },
        "exports": written.exports,
        "train_counts": written.train_counts,
    }


def _count_rows(built: BuiltVersion) -> RowCounts:
    """Accounts for every event and every drawn negative: a record, or a reason why it is none."""
    events, drawn = built.events, built.drawn
    written = {split.name: split.rows for split in built.written.built}
    if any(n + drawn.get(s, 0) != written[s] for s, n in events.splits.items()):
        raise InternalError(
            "the number of records written is not the number of events kept",
            received=written,
            allowed=events.splits,
            fix="nothing was published; run again, and report this if it stays",
        )
    return RowCounts(
        read={name: count.read for name, count in built.sources.items()},
        quarantined={name: count.bad for name, count in built.sources.items()},
        joined=events.joined,
        kept=written,
        dropped=events.dropped,
        drawn=drawn,
        unmatched=events.unmatched,
        lost_conversions=events.lost_conversions,
        matched={name: counts[MATCHED] for name, counts in events.matches.items()},
        maturity=events.maturity,
        short_users=events.short_users,
        test_in_log=events.test_in_log,
        late=events.late,
        ties=events.ties,
        labelled=count_labelled(built.written.statistics, built.encoders.plan.schema),
    )


def _label_rate(label: str | None, written: WrittenRecords) -> Mapping[str, float]:
    if label is None:
        return {}
    rates = {split: written.statistics[split].get(label, {}).get("mean") for split in EVENT_SPLITS}
    return {split: float(rate) for split, rate in rates.items() if rate is not None}


def join_spans(events: EventCounts, base: tuple[Path, Manifest] | None) -> tuple[int, int] | None:
    """Returns the first and last event time of a version, that of its kept days included."""
    spans = [events.event_ts_ms_range]
    spans += [] if base is None else [base[1].source.event_ts_ms_range]
    known = [span for span in spans if span is not None]
    if not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)
