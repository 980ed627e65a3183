"""Infers which features TFRecord files hold, from a pass over their records."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable
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
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, Kind, WireFeature

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
    """Fills `found`, `_FOUND` `[room]`, a row a key, from records, int64 `[rows, 2]`.

    `feature` is a row of a feature table without outputs, of the depth of the map's features, and
    `table` a hash table of the keys, all -1. Returns the outcome, the record at which the pass
    ended, and the number of keys.
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


def _collect(data: np.ndarray, index: np.ndarray, tag: int, room: int) -> tuple[int, int, Any]:
    """Calls the kernel with room for all keys, of which so many are expected; see there."""
    feature = np.zeros(1, FEATURE)[0]
    feature["depth"] = 2 if tag == FEATURE_LISTS_TAG else 1
    while True:
        found, table = np.empty(room, _FOUND), np.full(2 * room, -1, np.int64)
        outcome, record, count = _collect_features(
            data.ctypes.data, index, tag, feature, found, table
        )
        if outcome != _NO_ROOM:
            return int(outcome), int(record), found[:count].tolist()
        room *= 2


_MAPS = {"Example": (FEATURES_TAG,), "SequenceExample": (FEATURES_TAG, FEATURE_LISTS_TAG)}


class FeatureCollector:
    """Gathers what records hold, block by block."""

    def __init__(self, record_type: str = "Example") -> None:
        """Starts with no record of `"Example"`, `"SequenceExample"` or `"ByteArray"`."""
        check_record_type(record_type)
        self.records = 0
        # By tag of the map and key: kinds as bits, and the longest list.
        self._found: dict[tuple[int, bytes], tuple[int, int]] = {}
        # The keys of files in which no key has a value so far; None: one has.
        self._bare: dict[str, set[bytes] | None] = {}
        self._with_lists: str | None = None  # A file of Examples that holds feature lists.
        self._record_type, self._room = record_type, _FIRST_ROOM

    def update(self, block: RecordBlock, name: str = "<buffer>") -> None:
        """Takes in a block of records of a file; refuses those that are not well-formed."""
        for tag in _MAPS.get(self._record_type, ()):
            held = self._take(tag, block, name)
            if (bare := self._bare.setdefault(name, set())) is not None:
                has_values = any(map(_has_values, held.values()))
                self._bare[name] = None if has_values else bare | held.keys()
        if self._record_type == "Example" and count_feature_lists(block):
            self._with_lists = name
        self.records += len(block.index)

    def _take(self, tag: int, block: RecordBlock, name: str) -> dict[bytes, int]:
        """Takes in a map of the records; returns the kinds that it holds, as bits by key."""
        data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
        outcome, record, rows = _collect(data, index, tag, self._room)
        if outcome == _MALFORMED:
            reason = f"not a tf.train.{self._record_type}"
            raise corrupt_record(name, *block.locate(record), reason)
        self._room = max(self._room, 1 << len(rows).bit_length())
        held: dict[bytes, int] = {}
        for head, length, kinds, longest in rows:
            start = head + 4 - data.ctypes.data
            key = data[start : start + length].tobytes()
            if kinds:
                held[key] = kinds
            known, length = self._found.get((tag, key), (0, 0))
            self._found[tag, key] = known | kinds, max(length, longest)
        return held

    def names(self) -> list[str]:
        """Names of all features found so far, also of those that never held a value."""
        return [_as_text(key) for _, key in self._found]

    def features(self, names: Collection[str] | None = None) -> list[WireFeature]:
        """Returns the features found so far, or those of some names, as they first occurred.

        A feature that never held more than one value is a scalar, any other a list. One that
        never held a list of any kind is left out. The context stands before the feature lists.
        """
        if self._record_type == "ByteArray":
            return [BYTE_ARRAY_FEATURE]
        if names is None:
            self.refuse_other_messages()
        features: dict[str, WireFeature] = {}
        for tag, key in sorted(self._found, key=lambda place: place[0]):
            kinds, longest = self._found[tag, key]
            name, is_nested = _as_text(key), tag == FEATURE_LISTS_TAG
            if (names is not None and name not in names) or not (kind := _read_kind(name, kinds)):
                continue
            if name.encode() != key:
                raise _refuse("the name of a feature is no UTF-8", repr(key), "UTF-8")
            if name in features:
                raise _refuse(
                    f"feature {name!r} occurs twice",
                    "the same name in the context and among the feature lists",
                    "distinct names",
                )
            is_list = not is_nested and longest > 1
            features[name] = WireFeature(name, kind, is_list, is_nested)
        return list(features.values())

    def refuse_other_messages(self, known: Iterable[str] = ()) -> None:
        """Refuses files of other messages, most of which parse as an Example without a value.

        A SequenceExample parses as one of its context alone. A file of empty records beside others
        has as many rows of nulls. Records may hold the `known` features.
        """
        valued = {key for (_, key), (kinds, _) in self._found.items() if _has_values(kinds)}
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


def _as_text(key: bytes) -> str:
    return key.decode("utf-8", errors="replace")


def _read_kind(name: str, kinds: int) -> Kind | None:
    """The one kind of a feature's values; None where it has none."""
    present = [kind for kind, code in KIND_CODES.items() if kinds >> code & 1]
    if len(present) > 1:
        what = f"feature {name!r} holds different kinds of values in different records"
        raise _refuse(what, ", ".join(present), "one kind")
    return present[0] if present else None


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
