"""What the manifest says of the source: event times, how columns are written, which are items'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from conf.dates import find_date_unit
from conf.encoders import EncoderPlan
from conf.manifest import Manifest, bound_row_list
from training.raw_inputs.inputs import InputColumn, WrittenForm, find_forms

AnyInput = TypeVar("AnyInput", bound=InputColumn)


@dataclass(frozen=True)
class SourceFacts:
    """What raw inputs are checked and read by."""

    event_time: str | None = None  # column of the log's times, if these are known to be dates
    forms: Mapping[str, WrittenForm] = field(default_factory=dict)  # by column
    lengths: Mapping[str, int] = field(default_factory=dict)  # most values of a list, by feature

    def complete(self, item: AnyInput, time_unit: str | None = None) -> AnyInput:
        """Returns an input with how its column is written, and the unit of its times if any."""
        form = self.forms.get(item.column)
        if form is not None and form.time is not None:
            time_unit = time_unit or "ms"
        kind = None
        if time_unit is not None and self.event_time is not None:
            kind = "event" if item.column == self.event_time else "date"
        max_len = self.lengths.get(item.feature, item.max_len) if item.is_list else None
        return replace(item, max_len=max_len, written=form, time_unit=time_unit, time_kind=kind)


def read_source_facts(manifest: Manifest) -> SourceFacts:
    """Returns what is known of the source that a dataset version was built from."""
    span, config = manifest.source.event_ts_ms_range, manifest.source.config
    are_dates = span is not None and all(find_date_unit(end) == "ms" for end in span)
    event_time = (config.get("events") or {}).get("time") if are_dates else None
    bounds = {spec.name: bound_row_list(manifest, spec) for spec in manifest.schema.features}
    lengths = {name: spec.max_len for name, spec in bounds.items() if spec.max_len is not None}
    return SourceFacts(event_time, find_forms(config), lengths)


def find_item_columns(manifest: Manifest, plan: EncoderPlan) -> frozenset[str]:
    """Returns the raw columns of items: of features of role item, joined or counted by such."""
    schema, key = manifest.schema, manifest.keys.item
    features = [*(spec.name for spec in schema.by_role("item")), *([] if key is None else [key])]
    known = {column.feature: column for column in plan.columns}
    found = {raw for name in features if name in known for raw in known[name].raw_columns}
    config = manifest.source.config
    for join in config.get("joins") or ():  # In order: a dictionary may bring another one's key.
        if join.get("column") in found:
            source = (config.get("sources") or {}).get(join.get("source")) or {}
            names = {column["name"] for column in source.get("columns") or ()}
            found |= names - {source.get("key")}
    for rolling in config.get("rolling") or ():
        if found & set(rolling.get("keys") or ()):
            found.add(rolling["name"])
    return frozenset(found)


def find_aligned(manifest: Manifest, plan: EncoderPlan) -> tuple[tuple[str, ...], ...]:
    """Finds the groups of lists that stand side by side: of a history, of pairs, of imports."""
    config = manifest.source.config
    columns = [
        {history["name"], *(f"{history['name']}_{name}" for name in history["columns"]),
         *((f"{history['name']}_age",) if history["gaps"] else ())}
        for history in config.get("histories") or ()
    ]  # fmt: skip
    for source in (config.get("sources") or {}).values():
        pairs = [column for column in source.get("columns") or () if column.get("pair")]
        columns += [{column["name"], column["pair"]} for column in pairs]
    found = [
        tuple(
            column.feature
            for column in plan.columns
            if manifest.schema[column.feature].is_list and group.intersection(column.raw_columns)
        )
        for group in columns
    ]
    groups = [*found, *map(tuple, config.get("aligned") or ())]
    return tuple(group for group in groups if len(group) > 1)


def find_pair_features(
    manifest: Manifest, plan: EncoderPlan, features: Iterable[str]
) -> tuple[str, ...]:
    """Returns the features of an item's column that are known of a row's own item alone."""
    columns = find_item_columns(manifest, plan)
    return tuple(
        name
        for name in features
        if manifest.schema[name].role != "item" and columns & plan.column(name).raw_columns
    )
