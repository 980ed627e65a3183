"""Infers which features TFRecord files hold, from a pass over their records."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf.errors import InputDataError
from etl.tfrecord.codec.framing import BadRange, RecordBlock, corrupt_record, read_record_blocks
from etl.tfrecord.codec.kernels import inlined, kernel
from etl.tfrecord.codec.messages import (
    ENTRY_TAG,
    FEATURE_LISTS_TAG,
    FEATURES_TAG,
    KeyTable,
    check_record_type,
    find_key,
    measure_value,
    read_field,
    read_key,
)
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, WireFeature

_OK, _MALFORMED, _NO_ROOM = range(3)

# Fields of a row about a key that is not known.
_KEY, _KEY_LENGTH, _KINDS, _LENGTH, _UNKNOWN_FIELDS = range(5)
_FIRST_ROOM = 1024


@inlined
def _collect_entries(base, p, end, is_nested, keys, table, kinds, lengths, unknown, found):
    """Goes through one Features or FeatureLists message; returns outcome and unknown keys."""
    expected = np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return _MALFORMED, found
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            present, lists, values, _, _ = measure_value(start, stop, is_nested)
            if key < 0 or present < 0:
                return _MALFORMED, found
            count = lists if is_nested else values
            f = find_key(keys, table, expected, key, length)
            if f >= 0:
                kinds[f] |= present
                lengths[f] = max(lengths[f], count)
                expected = f + 1 if f + 1 < len(keys) else np.int64(0)
            elif found == len(unknown):
                return _NO_ROOM, found
            else:
                unknown[found, _KEY], unknown[found, _KEY_LENGTH] = key - base, length
                unknown[found, _KINDS], unknown[found, _LENGTH] = present, count
                found += 1
        p = stop
    return _OK, found


@kernel
def _collect_features(base, index, first, map_tag, keys, table, kinds, lengths, unknown):
    """Notes what records hold: bit k of `kinds[f]` for kind k, and the longest list of each.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        first: Record to begin with.
        map_tag: Tag of the map in a record.
        keys: Keys known so far.
        table: Hash table of these.
        kinds: int64 `[keys]`, updated.
        lengths: int64 `[keys]`, updated.
        unknown: Output, int64 `[room, _UNKNOWN_FIELDS]`: where entries with other keys lie, and
            what they hold; a key may occur in it several times.

    Returns:
        Outcome (`_NO_ROOM` where the last record must be gone through again, after what `unknown`
        holds has been taken over), the record at which the pass ended, and rows of `unknown`.
    """
    found = np.int64(0)
    for row in range(first, len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return _MALFORMED, row, found
            if tag == map_tag:
                outcome, found = _collect_entries(
                    base, start, stop, map_tag == FEATURE_LISTS_TAG, keys, table, kinds, lengths,
                    unknown, found,
                )  # fmt: skip
                if outcome != _OK:
                    return outcome, row, found
            p = stop
    return _OK, len(index), found


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


@dataclass
class _Found:
    """What is known of a key: kinds as bits, and its longest list."""

    kinds: int = 0
    length: int = 0

    def add(self, kinds: int, length: int) -> None:
        self.kinds, self.length = self.kinds | kinds, max(self.length, length)


class _MapCollector:
    """Gathers what one map of the records holds: features, context or feature lists."""

    def __init__(self, message: str, tag: int) -> None:
        self.found: dict[bytes, _Found] = {}
        self._message, self._tag = message, tag
        self._keys, self._room = KeyTable([]), _FIRST_ROOM

    @property
    def is_nested(self) -> bool:
        return self._tag == FEATURE_LISTS_TAG

    def update(self, block: RecordBlock, name: str) -> dict[bytes, int]:
        """Takes in a block; returns the kinds that its records hold, as bits by key."""
        held: dict[bytes, int] = {}
        data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
        first, outcome = 0, _NO_ROOM
        while outcome == _NO_ROOM:
            kinds, lengths = np.zeros((2, len(self.found)), np.int64)
            unknown = np.empty((self._room, _UNKNOWN_FIELDS), np.int64)
            outcome, record, rows = _collect_features(
                data.ctypes.data, index, first, self._tag, self._keys.rows, self._keys.table,
                kinds, lengths, unknown,
            )  # fmt: skip
            known = zip([*self.found], kinds.tolist(), lengths.tolist(), strict=True)
            fresh = [
                (data[start : start + length].tobytes(), *found)
                for start, length, *found in unknown[:rows].tolist()
            ]
            for key, bits, length in (*known, *fresh):
                self.found.setdefault(key, _Found()).add(bits, length)
                if bits:
                    held[key] = held.get(key, 0) | bits
            if fresh:
                self._keys = KeyTable([*self.found])
                self._room = max(self._room, 2 * len(self.found))
            first = int(record)
        if outcome == _MALFORMED:
            raise corrupt_record(name, *block.locate(int(record)), f"not a {self._message}")
        return held

    def features(self, names: Collection[str] | None) -> list[WireFeature]:
        """The features found so far, or those of some names."""
        found = []
        for key, held in self.found.items():
            name = key.decode("utf-8", errors="replace")
            if names is not None and name not in names:
                continue
            present = [kind for kind, code in KIND_CODES.items() if held.kinds >> code & 1]
            if len(present) > 1:
                raise _refuse(
                    f"feature {name!r} holds different kinds of values in different records",
                    ", ".join(present), "one kind",
                )  # fmt: skip
            is_list = not self.is_nested and held.length > 1
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
        """Returns the features found so far, in the order in which they first occurred.

        A feature that never held more than one value is a scalar, any other a list. One that
        never held a list of any kind is left out. The context stands before the feature lists.

        Args:
            names: Names of features to look at; None: all.

        Raises:
            InputDataError: A feature held different kinds of values, or a name is both in the
                context and among the feature lists; or a file holds other messages.
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
        valued = {key for key, held in found if _has_values(held.kinds)}
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
    max_records: int | None = None,
    on_corrupt: Callable[[BadRange], None] | None = None,
) -> list[WireFeature]:
    """Finds out which features files hold; see `FeatureCollector.features`.

    Args:
        paths: TFRecord files.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.
        max_records: How many records to look at, from the first file on; None for all.
        on_corrupt: Receives bytes that are no sound record; None to raise it.

    Returns:
        Features in the order in which they first occur.

    Raises:
        CorruptRecordError: A file is damaged, or a record is not of the record type.
        InputDataError: A feature holds different kinds of values in different records.
        ConfigError: Unknown record type.
    """
    collector = FeatureCollector(record_type)
    if record_type == "ByteArray":
        return collector.features()
    for path in paths:
        if max_records is not None and collector.records >= max_records:
            break
        for block in read_record_blocks(path, on_corrupt=on_corrupt):
            left = None if max_records is None else max_records - collector.records
            few = RecordBlock(block.data, block.index[:left], block.offset, block.first_record)
            collector.update(few, str(path))
            if max_records is not None and collector.records >= max_records:
                break
    return collector.features()
