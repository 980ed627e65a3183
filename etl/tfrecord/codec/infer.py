"""Infers which features TFRecord files hold, from a pass over their records."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import InputDataError
from etl.tfrecord.codec.decode_kernels import (
    ENTRY_TAG,
    FEATURE,
    FEATURE_LISTS_TAG,
    FEATURES_TAG,
    KEY_FIELDS,
    build_row,
    check_record_type,
    find_key,
    find_slot,
    read_field,
    read_key,
    read_simple_entry,
    take_list,
    take_value,
)
from etl.tfrecord.codec.framing import (
    CorruptRecordError,
    RecordBlock,
    corrupt_record,
    read_record_blocks,
)
from etl.tfrecord.codec.kernels import inlined, kernel
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, WireFeature

_OK, _MALFORMED, _NO_ROOM = range(3)

# What is found of a key: bit k for kind k, and the length of the longest list.
_FOUND = build_row(*KEY_FIELDS, "kinds", "longest")
_FIRST_ROOM = 1024


@inlined
def _collect_entries(feature, p, end, found, table, count):
    """Goes through one Features or FeatureLists message; returns outcome and number of keys."""
    expected, none, zero = np.int64(0), np.int64(0), np.int64(0)
    while p < end:
        kind, low, high, stop = read_simple_entry(found[expected], p, end)
        if kind > 0 and feature.depth < 2:
            f, kinds = expected, np.int64(1) << kind
            size, _ = take_list(feature, zero, kind, low, high, high, zero, zero)
            if size < 0:
                return _MALFORMED, count
        else:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return _MALFORMED, count
            if tag != ENTRY_TAG:
                p = stop
                continue
            key, length = read_key(start, stop)
            kinds, values, _, lists = take_value(feature, none, start, stop, stop, zero, zero, zero)
            if key < 0 or kinds < 0:
                return _MALFORMED, count
            size = lists if feature.depth > 1 else values
            f = find_key(found, table, expected, key, length)
            if f < 0:
                if count == len(found):
                    return _NO_ROOM, count
                f = count
                table[find_slot(found, table, key, length)] = f
                found[f].head, found[f].key_bytes = key - 4, length
                found[f].kinds, found[f].longest = 0, 0
                count += 1
        found[f].kinds |= kinds
        found[f].longest = max(found[f].longest, size)
        expected = f + 1 if f + 1 < count else zero
        p = stop
    return _OK, count


@kernel
def _collect_features(base, index, map_tag, feature, found, table):
    """Notes what records hold.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        map_tag: Tag of the map in a record.
        feature: Row of a feature table without outputs, of the depth of the map's features.
        found: Output, `_FOUND` `[room]`: a row for each key.
        table: Hash table of the keys, all -1.

    Returns:
        Outcome, the record at which the pass ended, and the number of keys.
    """
    count = np.int64(0)
    found[0].key_bytes = -1  # no key has this length
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return _MALFORMED, row, count
            if tag == map_tag:
                outcome, count = _collect_entries(feature, start, stop, found, table, count)
                if outcome != _OK:
                    return outcome, row, count
            p = stop
    return _OK, len(index), count


@kernel
def _count_maps(base, index, map_tag):
    """Number of records that hold a map of this tag; arguments as for `_collect_features`."""
    found = np.int64(0)
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, _, stop = read_field(p, end)
            if tag == map_tag and stop >= 0:
                found += 1
                break
            p = end if stop < 0 else stop
    return found


class _MapCollector:
    """Gathers what one map of the records holds: features, context or feature lists."""

    def __init__(self, message: str, tag: int) -> None:
        self.found: dict[bytes, tuple[int, int]] = {}  # kinds as bits, and the longest list
        self._message, self._tag, self._room = message, tag, _FIRST_ROOM
        self._feature = np.zeros(1, FEATURE)[0]
        self._feature["depth"] = 2 if self.is_nested else 1

    @property
    def is_nested(self) -> bool:
        return self._tag == FEATURE_LISTS_TAG

    def update(self, block: RecordBlock, name: str) -> dict[bytes, int]:
        """Takes in a block; returns the kinds that its records hold, as bits by key."""
        data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
        outcome, record, rows = self._collect(data, index)
        if outcome == _MALFORMED:
            raise corrupt_record(name, *block.locate(record), f"not a {self._message}")
        held: dict[bytes, int] = {}
        for head, length, kinds, longest in rows:
            start = head + 4 - data.ctypes.data
            key = data[start : start + length].tobytes()
            if kinds:
                held[key] = kinds
            known, length = self.found.get(key, (0, 0))
            self.found[key] = known | kinds, max(length, longest)
        return held

    def _collect(self, data: np.ndarray, index: np.ndarray) -> tuple[int, int, list[list[int]]]:
        """Calls the kernel with room for all keys; returns what it does, and the rows."""
        while True:
            found = np.empty(self._room, _FOUND)
            table = np.full(2 * self._room, -1, np.int64)
            outcome, record, count = _collect_features(
                data.ctypes.data, index, self._tag, self._feature, found, table
            )
            if outcome != _NO_ROOM:
                return int(outcome), int(record), found[:count].tolist()
            self._room *= 2

    def features(self, names: Collection[str] | None) -> list[WireFeature]:
        """The features found so far, or those of some names."""
        found = []
        for key, (kinds, length) in self.found.items():
            name = key.decode("utf-8", errors="replace")
            if names is not None and name not in names:
                continue
            present = [kind for kind, code in KIND_CODES.items() if kinds >> code & 1]
            if len(present) > 1:
                raise _refuse(
                    f"feature {name!r} holds different kinds of values in different records",
                    ", ".join(present), "one kind",
                )  # fmt: skip
            is_list = not self.is_nested and length > 1
            found += [WireFeature(name, kind, is_list, self.is_nested) for kind in present]
        return found


class FeatureCollector:
    """Gathers what records hold, block by block."""

    def __init__(self, record_type: str = "Example") -> None:
        """Starts with no record of `"Example"`, `"SequenceExample"` or `"ByteArray"`."""
        check_record_type(record_type)
        self.records = 0
        # The keys of files in which no key has a value so far; None: one has.
        self._bare: dict[str, set[bytes] | None] = {}
        self._with_lists: str | None = None  # A file of Examples that holds feature lists.
        self._record_type = record_type
        tags = {"Example": (FEATURES_TAG,), "SequenceExample": (FEATURES_TAG, FEATURE_LISTS_TAG)}
        message = f"tf.train.{record_type}"
        self._maps = [_MapCollector(message, tag) for tag in tags.get(record_type, ())]

    def update(self, block: RecordBlock, name: str = "<buffer>") -> None:
        """Takes in a block of records of a file; refuses those that are not well-formed."""
        for collector in self._maps:
            self._note(name, collector.update(block, name))
        if self._record_type == "Example" and count_feature_lists(block):
            self._with_lists = name
        self.records += len(block.index)

    def _note(self, name: str, held: Mapping[bytes, int]) -> None:
        bare = self._bare.setdefault(name, set())
        if bare is not None:
            has_values = any(map(_has_values, held.values()))
            self._bare[name] = None if has_values else bare | held.keys()

    def names(self) -> list[str]:
        """Names of all features found so far, also of those that never held a value."""
        keys = [key for collector in self._maps for key in collector.found]
        return [key.decode("utf-8", errors="replace") for key in keys]

    def features(self, names: Collection[str] | None = None) -> list[WireFeature]:
        """Returns the features found so far, or those of some names, as they first occurred.

        A feature that never held more than one value is a scalar, any other a list. One that
        never held a list of any kind is left out. The context stands before the feature lists.
        """
        if self._record_type == "ByteArray":
            return [BYTE_ARRAY_FEATURE]
        if names is None:
            self.refuse_other_messages()
        features = [f for collector in self._maps for f in collector.features(names)]
        seen: set[str] = set()
        for feature in features:
            if feature.name in seen:
                raise _refuse(
                    f"feature {feature.name!r} occurs twice",
                    "the same name in the context and among the feature lists, or two names that "
                    "are no UTF-8",
                    "distinct names",
                )
            seen.add(feature.name)
        return features

    def refuse_other_messages(self, known: Iterable[str] = ()) -> None:
        """Refuses files of other messages, most of which parse as an Example without a value.

        A SequenceExample parses as one of its context alone. A file of empty records beside others
        has as many rows of nulls. Records may hold the `known` features.
        """
        found = [pair for collector in self._maps for pair in collector.found.items()]
        valued = {key for key, (kinds, _) in found if _has_values(kinds)}
        valued |= {name.encode() for name in known}
        for name, keys in self._bare.items():
            if keys is not None and (keys or not valued) and not keys & valued:
                raise InputDataError(
                    f"the records of {name} hold no feature",
                    received=f"messages that parse as {self._record_type}, without a value",
                    allowed="tf.train.Example, or tf.train.SequenceExample",
                    fix="read other messages, such as ExampleListWithContext, as ByteArray",
                )
        if self._with_lists is not None:
            raise InputDataError(
                f"the records of {self._with_lists} hold feature lists, which an Example has not",
                received="tf.train.SequenceExample",
                fix="read the files with record type SequenceExample",
            )


def _has_values(kinds: int) -> bool:
    """Whether some kind stands in the bits of `_collect_features`; the first is that of none."""
    return kinds > 1


def _refuse(what: str, received: str, allowed: str) -> InputDataError:
    fix = "give the features to read, without this one"
    return InputDataError(what, received=received, allowed=allowed, fix=fix)


def count_feature_lists(block: RecordBlock) -> int:
    """Returns how many records of a block hold feature lists, as SequenceExamples alone do.

    A SequenceExample without feature lists has the bytes of an Example with its context.
    """
    data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
    return int(_count_maps(data.ctypes.data, index, FEATURE_LISTS_TAG))


def infer_features(
    paths: Iterable[str | Path],
    record_type: str = "Example",
    most: int | None = None,
    is_lenient: bool = False,
    **reading: Any,
) -> list[WireFeature]:
    """Finds out which features the first records of each file hold, `most` of them or all.

    Damage is raised, or passed over if lenient; `reading` is as of `read_record_blocks`. See
    `FeatureCollector.features`.
    """
    collector = FeatureCollector(record_type)
    on_corrupt = (lambda _: None) if is_lenient else None  # what is read later tells of it
    for path in () if record_type == "ByteArray" else paths:
        left = sys.maxsize if most is None else most
        for block in read_record_blocks(path, on_corrupt=on_corrupt, **reading):
            _take_in(collector, block.cut(slice(left)), str(path), is_lenient)
            left -= len(block.index)
            if left <= 0:
                break
    return collector.features()


def _take_in(collector: FeatureCollector, block: RecordBlock, name: str, is_lenient: bool) -> None:
    try:
        collector.update(block, name)
    except CorruptRecordError:
        if not is_lenient:
            raise
        for row in range(len(block.index)):
            with contextlib.suppress(CorruptRecordError):
                collector.update(block.cut(slice(row, row + 1)), name)
