"""What the manifest says of the source: its event times, and how its columns are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from conf.dates import find_date_unit
from conf.manifest import Manifest
from training.scoring.input_columns import InputColumn
from training.scoring.written_values import WrittenForm, find_forms

AnyInput = TypeVar("AnyInput", bound=InputColumn)


@dataclass(frozen=True)
class SourceFacts:
    """What raw inputs are checked and read by.

    Attributes:
        event_time: Column of the log's times, where they are dates; None: they are none, or not
            known.
        forms: How each column is written, by its name; one that is not there comes as it is.
    """

    event_time: str | None = None
    forms: Mapping[str, WrittenForm] = field(default_factory=dict)

    def complete(self, item: AnyInput, time_unit: str | None = None) -> AnyInput:
        """Returns an input with how its column is written, and its times if it has some.

        Args:
            item: The input.
            time_unit: Unit of the times that a date is made of; None: of a timestamp milliseconds.
        """
        form = self.forms.get(item.column)
        if form is not None and form.time is not None:
            time_unit = time_unit or "ms"
        kind = None
        if time_unit is not None and self.event_time is not None:
            kind = "event" if item.column == self.event_time else "date"
        return replace(item, written=form, time_unit=time_unit, time_kind=kind)


def read_source_facts(manifest: Manifest) -> SourceFacts:
    """Returns what is known of the source that a dataset version was built from."""
    span, config = manifest.source.event_ts_ms_range, manifest.source.config
    forms = find_forms(config)
    if span is None or any(find_date_unit(end) != "ms" for end in span):
        return SourceFacts(None, forms)
    return SourceFacts((config.get("events") or {}).get("time"), forms)
