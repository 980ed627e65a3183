"""Infers which features TFRecord files hold, from a pass over their records."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.decode_columns import KeyTable
from etl.tfrecord.codec.decode_kernels import FEATURE_LISTS_TAG, FEATURES_TAG, measure_feature_list
from etl.tfrecord.codec.framing import BadRange, RecordBlock, corrupt_record, read_record_blocks
from etl.tfrecord.codec.kernels import inlined, kernel
from etl.tfrecord.codec.message_kernels import (
    ABSENT,
    ENTRY_TAG,
    MALFORMED,
    OK,
    find_feature,
    measure_entry,
    read_field,
    read_key,
)
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, WireFeature

NO_ROOM = 9  # an outcome of its own

# Fields of a row about a key that is not known.
KEY, KEY_LENGTH, KINDS, LENGTH = range(4)
UNKNOWN_FIELDS = 4


@inlined
def _measure(start, stop, is_sequence):
    """Kinds (as bits; negative if malformed) and number of values of an entry."""
    if is_sequence:
        outcome, kinds, lists, _, _ = measure_feature_list(start, stop, ABSENT)
        return np.int64(-1) if outcome == MALFORMED else kinds, lists
    kind, count, _, _ = measure_entry(start, stop)
    return np.int64(-1) if count < 0 else np.int64(1) << kind, count


@inlined
def _collect_entries(base, p, end, is_sequence, features, table, kinds, lengths, unknown, found):
    """Goes through one Features or FeatureLists message; returns outcome and unknown keys."""
    expected = np.int64(0)
    while p < end:
        tag, start, stop = read_field(p, end)
        if stop < 0:
            return MALFORMED, found
        if tag == ENTRY_TAG:
            key, length = read_key(start, stop)
            present, count = _measure(start, stop, is_sequence)
            if key < 0 or present < 0:
                return MALFORMED, found
            f = find_feature(features, table, expected, key, length)
            if f >= 0:
                kinds[f] |= np.uint8(present)
                lengths[f] = max(lengths[f], count)
                expected = f + 1 if f + 1 < len(features) else np.int64(0)
            elif found == len(unknown):
                return NO_ROOM, found
            else:
                unknown[found, KEY], unknown[found, KEY_LENGTH] = key - base, length
                unknown[found, KINDS], unknown[found, LENGTH] = present, count
                found += 1
        p = stop
    return OK, found


@kernel
def collect_features(
    base, index, first, is_sequence, message_tag, features, table, kinds, lengths, unknown
):
    """Notes what records hold: bit k of `kinds[f]` for kind k, and the longest list of each.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        first: Record to begin with.
        is_sequence: Whether map values are FeatureLists, else Features.
        message_tag: Tag of the message with the map in a record.
        features: Keys known so far; the other fields are not used.
        table: Hash table of their keys.
        kinds: uint8 `[features]`, updated.
        lengths: int64 `[features]`, updated.
        unknown: Output, int64 `[room, UNKNOWN_FIELDS]`: where entries with other keys lie, and
            what they hold; a key may occur in it several times.

    Returns:
        Outcome (`NO_ROOM` where the last record must be gone through again, after what `unknown`
        holds has been taken over), the record at which the pass ended, and rows of `unknown`.
    """
    found = np.int64(0)
    for row in range(first, len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, start, stop = read_field(p, end)
            if stop < 0:
                return MALFORMED, row, found
            if tag == message_tag:
                outcome, found = _collect_entries(
                    base, start, stop, is_sequence, features, table, kinds, lengths, unknown, found
                )
                if outcome != OK:
                    return outcome, row, found
            p = stop
    return OK, len(index), found


@kernel
def count_messages(base, index, message_tag):
    """Number of records that hold a message of this tag.

    Args:
        base: Address of the buffer.
        index: Start and length of each record, int64 `[rows, 2]`.
        message_tag: Tag of a message in a record.
    """
    found = np.int64(0)
    for row in range(len(index)):
        p = base + index[row, 0]
        end = p + index[row, 1]
        while p < end:
            tag, _, stop = read_field(p, end)
            if tag == message_tag and stop >= 0:
                found += 1
                break
            p = end if stop < 0 else stop
    return found


_FIRST_ROOM = 1024


@dataclass
class _Found:
    """What is known of a key: kinds as bits, and its longest list."""

    kinds: int
    length: int


class _MapCollector:
    """Gathers what one map of the records holds: features, context or feature lists."""

    def __init__(self, message: str, tag: int, is_sequence: bool) -> None:
        self.found: dict[bytes, _Found] = {}
        self._message, self._tag, self._is_sequence = message, tag, is_sequence
        self._keys, self._room = KeyTable([]), _FIRST_ROOM

    def update(self, block: RecordBlock, name: str) -> dict[bytes, int]:
        """Takes in a block; returns the kinds that its records hold, as bits by key."""
        held: dict[bytes, int] = {}
        data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
        first, outcome = 0, NO_ROOM
        while outcome == NO_ROOM:
            kinds, lengths = np.zeros((2, len(self.found)), np.int64)
            bits, unknown = kinds.astype(np.uint8), np.empty((self._room, UNKNOWN_FIELDS), int)
            outcome, record, rows = collect_features(
                data.ctypes.data, index, first, self._is_sequence, self._tag, self._keys.fields,
                self._keys.table, bits, lengths, unknown,
            )  # fmt: skip
            for (key, known), kind, length in zip(
                self.found.items(), bits.tolist(), lengths.tolist(), strict=True
            ):
                known.kinds, known.length = known.kinds | kind, max(known.length, length)
                if kind:
                    held[key] = held.get(key, 0) | kind
            self._take(data, unknown[:rows], held)
            first = int(record)
        if outcome == MALFORMED:
            offset = block.offset + int(block.index[record, 0])
            raise corrupt_record(
                name, offset, block.first_record + int(record), f"not a {self._message}"
            )
        return held

    def _take(self, data: np.ndarray, unknown: np.ndarray, held: dict[bytes, int]) -> None:
        """Takes over entries whose keys the kernel did not know."""
        for start, length, kinds, count in unknown.tolist():
            key = data[start : start + length].tobytes()
            known = self.found.setdefault(key, _Found(0, 0))
            known.kinds, known.length = known.kinds | kinds, max(known.length, count)
            held[key] = held.get(key, 0) | kinds
        if len(unknown):
            self._keys = KeyTable(list(self.found))
            self._room = max(self._room, 2 * len(self.found))


class FeatureCollector:
    """Gathers what records hold, block by block."""

    def __init__(self, record_type: str = "Example") -> None:
        """Starts with no record.

        Args:
            record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.

        Raises:
            ConfigError: Unknown record type.
        """
        if record_type not in ("Example", "SequenceExample", "ByteArray"):
            raise ConfigError(
                "unknown TFRecord record type",
                received=repr(record_type),
                allowed="Example, SequenceExample, ByteArray",
            )
        self.records = 0
        # The keys of files in which no key has a value so far; None: one has.
        self._bare: dict[str, set[bytes] | None] = {}
        self._with_lists: str | None = None  # A file of Examples that holds feature lists.
        self._record_type = record_type
        message = f"tf.train.{record_type}"
        self._maps: list[_MapCollector] = []
        if record_type != "ByteArray":
            self._maps.append(_MapCollector(message, FEATURES_TAG, is_sequence=False))
        if record_type == "SequenceExample":
            self._maps.append(_MapCollector(message, FEATURE_LISTS_TAG, is_sequence=True))

    def update(self, block: RecordBlock, name: str = "<buffer>") -> None:
        """Takes in a block of records.

        Args:
            block: Records whose framing is sound.
            name: What to call the file in an error.

        Raises:
            CorruptRecordError: A record is not well-formed.
        """
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
        features: list[WireFeature] = []
        for is_sequence, collector in enumerate(self._maps):
            for key, found in collector.found.items():
                name = key.decode("utf-8", errors="replace")
                if names is not None and name not in names:
                    continue
                present = [kind for kind, code in KIND_CODES.items() if found.kinds >> code & 1]
                if len(present) > 1:
                    raise _refuse(
                        f"feature {name!r} holds different kinds of values in different records",
                        ", ".join(present), "one kind",
                    )  # fmt: skip
                is_list = not is_sequence and found.length > 1
                features += [WireFeature(name, kind, is_list, bool(is_sequence))
                             for kind in present]  # fmt: skip
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
        has as many rows of nulls.

        Args:
            known: Names of features that such records may hold.

        Raises:
            InputDataError: There is such a file.
        """
        valued = {name.encode() for name in known} | {
            key
            for collector in self._maps
            for key, found in collector.found.items()
            if _has_values(found.kinds)
        }
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
    """Whether some kind stands in the bits of `collect_features`; the first one is that of none."""
    return kinds > 1


def _refuse(what: str, received: str, allowed: str) -> InputDataError:
    fix = "give the features to read, without this one"
    return InputDataError(what, received=received, allowed=allowed, fix=fix)


def count_feature_lists(block: RecordBlock) -> int:
    """Returns how many records of a block hold feature lists, as SequenceExamples alone do.

    A SequenceExample without feature lists has the bytes of an Example with its context.
    """
    data, index = np.ascontiguousarray(block.data), np.ascontiguousarray(block.index)
    return int(count_messages(data.ctypes.data, index, FEATURE_LISTS_TAG))


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
