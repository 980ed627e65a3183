"""Where the rows went: from the log to the records, every loss with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from conf.manifest import Manifest
from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Column,
    Figure,
    Note,
    Section,
    build_table,
    missing,
)
from jobs.reporting.numbers import MISSING, format_count, format_share
from jobs.reporting.plots import FlowStep, plot_flow
from jobs.reporting.run_data import RunData, as_mapping

EVENT_SPLITS = ("train", "validation", "test")


def build_flow(data: RunData) -> Section:
    """Bars from stage to stage beside the reasons of the losses."""
    lead = "Every row of the event log is either a record or has a reason for not being one."
    if data.manifest is None:
        return Section("flow", "Data flow", lead, (missing(data.gaps["dataset"]),))
    steps = event_steps(data.manifest)
    label = "Funnel of event rows: " + "; ".join(
        f"{step.name}: {format_count(sum(step.kept.values()))}" for step in steps
    )
    blocks: list[Block] = [
        Beside(
            (
                Figure(plot_flow(steps, label), "Rows of the event log, stage by stage."),
                _losses(data.manifest),
            )
        ),
        Beside((_sources(data.manifest), _splits(data.manifest))),
    ]
    if any(any(reasons.values()) for reasons in data.manifest.counts.unmatched.values()):
        blocks.append(_unmatched(data.manifest))
    unexplained = unexplained_rows(data.manifest)
    if unexplained:
        blocks.append(
            Note(f"{format_count(unexplained)} event rows have no reason: the counts of this "
                 "dataset version do not add up.", missing=True)
        )  # fmt: skip
    return Section("flow", "Data flow", lead, tuple(blocks))


def event_sources(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of the sources whose rows are events."""
    config = manifest.source.config
    named = (
        as_mapping(config.get("events")).get("source"),
        as_mapping(config.get("split")).get("validation_source"),
        as_mapping(config.get("split")).get("test_source"),
    )
    found = tuple(str(name) for name in named if name in manifest.counts.read)
    return found or tuple(manifest.counts.read)[:1]


def event_steps(manifest: Manifest) -> tuple[FlowStep, ...]:
    """Returns the stages that event rows go through, with what each stage lost."""
    counts = manifest.counts
    sources = event_sources(manifest)
    read = sum(counts.read[source] for source in sources)
    bad = sum(sum(counts.quarantined.get(source, {}).values()) for source in sources)
    events = {split: _events_of(manifest, split) for split in EVENT_SPLITS}
    kept = {split: n for split, n in events.items() if n}
    written = sum(kept.values())
    return (
        FlowStep("Read", {"rows": read}),
        FlowStep("Parsed", {"rows": read - bad}, bad, "bad rows"),
        FlowStep("De-duplicated and joined", {"rows": counts.joined},
                 max(read - bad - counts.joined, 0)),
        FlowStep("Written as records", kept, max(counts.joined - written, 0)),
    )  # fmt: skip


def unexplained_rows(manifest: Manifest) -> int:
    """Returns how many event rows are neither written, nor quarantined, nor dropped."""
    counts = manifest.counts
    sources = event_sources(manifest)
    read = sum(counts.read[source] for source in sources)
    bad = sum(sum(counts.quarantined.get(source, {}).values()) for source in sources)
    written = sum(_events_of(manifest, split) for split in EVENT_SPLITS)
    return abs(read - bad - written - sum(counts.dropped.values()))


def _events_of(manifest: Manifest, split: str) -> int:
    """Records of a split that are events of the log, and no drawn negatives."""
    return manifest.counts.kept.get(split, 0) - manifest.counts.drawn.get(split, 0)


def _losses(manifest: Manifest) -> Block:
    counts = manifest.counts
    rows: list[tuple[str, str, int, int]] = [
        (source, f"bad row: {_readable(reason)}", n, counts.read.get(source, 0))
        for source, reasons in counts.quarantined.items()
        for reason, n in reasons.items()
        if n
    ]
    events = event_sources(manifest)
    read = sum(counts.read[source] for source in events)
    rows += [("events", _readable(reason), n, read) for reason, n in counts.dropped.items() if n]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    if not rows:
        return Note("No row was left out.")
    top = max(row[2] for row in rows)
    columns = (Column("Reason", numeric=False), Column("From", numeric=False), Column("Rows"),
               Column("Share"))  # fmt: skip
    return build_table(
        "Rows left out, by reason.",
        columns,
        [
            [
                reason,
                source,
                Cell(format_count(n), bar=n / top, tone="loss"),
                format_share(n / of if of else None),
            ]
            for source, reason, n, of in rows
        ],
    )


def _unmatched(manifest: Manifest) -> Block:
    """Events without an entry in a dictionary: dropped or kept, as its join says."""
    joins = manifest.source.config.get("joins")
    policies = {
        str(join.get("source")): str(join.get("unmatched"))
        for join in map(as_mapping, joins if isinstance(joins, list | tuple) else ())
    }
    read = sum(manifest.counts.read[source] for source in event_sources(manifest))
    rows: list[list[Cell | str]] = [
        [
            dictionary,
            _readable(reason),
            {"drop": "left out", "keep": "kept"}.get(policies.get(dictionary, ""), MISSING),
            format_count(n),
            format_share(n / read if read else None),
        ]
        for dictionary, reasons in manifest.counts.unmatched.items()
        for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        if n
    ]
    columns = (Column("Dictionary", numeric=False), Column("Reason", numeric=False),
               Column("These events are", numeric=False), Column("Events"),
               Column("Share", hint="of the event rows that were read"))  # fmt: skip
    return build_table("Events without an entry in a dictionary.", columns, rows)


def _sources(manifest: Manifest) -> Block:
    counts = manifest.counts
    rows = []
    for source, read in counts.read.items():
        bad = sum(counts.quarantined.get(source, {}).values())
        share = format_share(bad / read if read else None)
        rows.append([source, format_count(read), format_count(bad), share])
    columns = (Column("Source", numeric=False), Column("Rows read"), Column("Bad rows"),
               Column("Share"))  # fmt: skip
    return build_table("Inputs.", columns, rows)


def _splits(manifest: Manifest) -> Block:
    written: Mapping[str, int] = {split.name: split.rows for split in manifest.splits}
    top = max(written.values(), default=0) or 1
    rate = manifest.label_rate
    columns = [Column("Split", numeric=False), Column("Records")]
    drawn = manifest.counts.drawn
    columns += [Column("Drawn", hint="negatives drawn, not events of the log")] if drawn else []
    columns += [Column("Label rate", hint="mean label")] if rate else []
    rows = []
    for name, records in written.items():
        cells: list[Cell | str] = [name, Cell(format_count(records), bar=records / top)]
        if drawn:
            cells.append(format_count(drawn.get(name, 0)))
        if rate:
            cells.append(format_share(rate[name]) if name in rate else MISSING)
        rows.append(cells)
    return build_table("Records per split.", columns, rows)


def _readable(reason: str) -> str:
    what, colon, column = reason.partition(":")  # a column's name keeps its underscores
    words = what.replace("_", " ")
    return f"{words}: {column.strip()}" if colon else words
