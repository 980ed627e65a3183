"""How declared features lie in records: what is declared, and what the records tell.

A `tf.train.SequenceExample` without feature lists has the bytes of a `tf.train.Example`: the type
of records is that of whole files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from conf.artefacts.counted_keys import CountedKeys
from conf.errors import InputDataError, did_you_mean
from conf.etl.imported import ImportConfig
from conf.manifest import SEQUENCE_RECORDS, InputFile
from conf.schema import PAD_ID, PackedSlot
from etl.imported.files import Files
from etl.imported.ids import find_pad_token
from etl.quality.label_statistics import LabelFocus
from etl.records.train_counts import TrainCounter
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector, count_feature_lists
from etl.tfrecord.types.features import WireFeature


@dataclass(frozen=True)
class ImportedFeatures:
    """How the declared features lie in the records.

    Attributes:
        config: The config.
        wire: What is decoded, in the order of the config.
        slots: Places of scalars that share a list.
        record_type: What a record is.
    """

    config: ImportConfig
    wire: tuple[WireFeature, ...]
    slots: tuple[PackedSlot, ...]
    record_type: Literal["Example", "SequenceExample"] = "Example"

    @property
    def feature_lists(self) -> tuple[str, ...]:
        """Features that stand in the feature lists of SequenceExamples."""
        return tuple(feature.name for feature in self.wire if feature.is_sequence)

    @property
    def id_lists(self) -> dict[str, int]:
        """Lists of ids, each with what pads it in the files."""
        found = zip(self.config.features, self.wire, strict=True)
        return {
            feature.name: find_pad_token(feature.offset) if feature.offset else PAD_ID
            for feature, wire in found
            if wire.is_list and (feature.reads_as_ids(wire.kind) or feature.are_keys)
        }

    def check_file(self, split: str, path: str, rows: int, with_lists: int) -> None:
        """Refuses a file of the other record type.

        Args:
            split: Its split.
            path: Where it lies.
            rows: Its records.
            with_lists: Those that hold feature lists.

        Raises:
            InputDataError: It is one.
        """
        if self.record_type != SEQUENCE_RECORDS and with_lists:
            raise InputDataError(
                f"{path} holds tf.train.SequenceExample: its feature lists would be left out",
                received=f"feature lists in {with_lists:,} of {rows:,} records",
                allowed="files of tf.train.Example",
                fix="set `record_type: SequenceExample`, or leave it out, if all files hold them; "
                "else import two datasets",
            )
        # Records of items alone need no sequence.
        is_free = split == "catalog" or self.config.record_type is not None
        if self.record_type == SEQUENCE_RECORDS and rows and not with_lists and not is_free:
            raise InputDataError(
                f"{path} holds tf.train.Example, and other files tf.train.SequenceExample",
                received=f"feature lists in none of {rows:,} records",
                allowed="files of one record type",
                fix="import two datasets; if they are SequenceExamples without a step, set "
                "`record_type: SequenceExample`",
            )

    @property
    def focus(self) -> LabelFocus | None:
        """The label that statistics compare features with: a number per row."""
        label = self.config.find_key("label")
        feature = next((f for f in self.wire if f.name == label), None)
        is_number = feature is not None and not feature.is_list and feature.kind != "bytes"
        if feature is None or not is_number:
            return None
        labels = tuple(f.name for f in self.config.features if f.role == "label")
        weighted = tuple(dict.fromkeys((feature.name, *labels)))
        return LabelFocus(feature.name, (), self.config.find_key("weight"), weighted)

    def build_counter(self) -> TrainCounter:
        """Builds what counts the keys of train records."""
        features = {feature.name: feature for feature in self.config.features}
        numbers = {f.name: f for f in self.wire if f.kind != "bytes"}

        def find(name: str | None, *, is_id: bool) -> str | None:
            wire = None if name is None else numbers.get(name)
            if wire is None or wire.is_list or (is_id and wire.kind != "int64"):
                return None
            return wire.name

        keys = CountedKeys(
            find(self.config.keys.user, is_id=True),
            find(self.config.keys.item, is_id=True),
            find(self.config.find_key("label"), is_id=False),
        )
        pads = {name: features[name].pad_value for name in keys.features.values()}
        own = {n: p for n, p in pads.items() if not features[n].reads_as_ids("int64")}
        return TrainCounter(keys, {name: int(pad) for name, pad in own.items() if pad is not None})


def plan_features(config: ImportConfig, files: Files) -> ImportedFeatures:
    """Plans how the features are read; looks into the files for types that are not declared.

    Raises:
        CorruptRecordError: A file is damaged, or holds records of no such type.
        InputDataError: No record holds a feature, records hold several kinds of values, other
            than whole numbers as ids, or a scalar where a list is wanted; files hold records of
            two types; or a list of any length has a `pad_value`.
    """
    slots = tuple(
        PackedSlot(name, packed, offset)
        for packed, names in config.packed.items()
        for offset, name in enumerate(names)
    )
    keys = {slot.feature: slot.packed for slot in slots}
    record_type = config.record_type or _find_record_type(files)
    known: dict[str, WireFeature] = {}
    if record_type == SEQUENCE_RECORDS or any(f.dtype is None for f in config.features):
        names = {keys.get(feature.name, feature.name) for feature in config.features}
        known = _look_into(files, ImportedFeatures(config, (), slots, record_type), names)
    wire = []
    for feature in config.features:
        dtype, is_list = feature.dtype, feature.length is not None or feature.max_len is not None
        if dtype is None:
            found = _require(known, keys.get(feature.name, feature.name))
            is_list = is_list or (found.is_list and feature.name not in keys)
            dtype = found.kind
            if is_list and feature.name in (config.keys.user, config.keys.item):
                raise InputDataError(
                    f"feature {feature.name!r} names a row's user or item, and has several values",
                    received="records with more than one value",
                    fix="correct these records, or name another feature by `keys`",
                )
        if (feature.reads_as_ids(dtype) or feature.are_keys) and dtype != "int64":
            raise InputDataError(
                f"feature {feature.name!r} holds no ids",
                received=dtype,
                allowed="int64",
                fix="leave out its `ids`, `offset` and `vocabulary_size`",
            )
        is_sequence = feature.name in known and known[feature.name].is_sequence
        wire.append(WireFeature(feature.name, dtype, is_list or is_sequence, is_sequence))
    _require_lists(config, wire)
    _refuse_padding(config, wire)
    return ImportedFeatures(config, tuple(wire), slots, record_type)


def _find_record_type(files: Files) -> Literal["Example", "SequenceExample"]:
    """Looks into the beginning of each file, until one has feature lists."""
    for file in _list_files(files):
        for block in islice(read_record_blocks(file.path), 1):
            if count_feature_lists(block):
                return SEQUENCE_RECORDS
    return "Example"


def _list_files(files: Files) -> list[InputFile]:
    return [file for listed in files.values() for file in listed]


def _look_into(files: Files, planned: ImportedFeatures, names: set[str]) -> dict[str, WireFeature]:
    """Reads files through, and returns what they hold of some features."""
    collector = FeatureCollector(planned.record_type)
    for split, listed in files.items():
        for file in listed:
            before, with_lists = collector.records, 0
            for block in read_record_blocks(file.path):
                collector.update(block, file.path)
                with_lists += count_feature_lists(block)
            planned.check_file(split, file.path, collector.records - before, with_lists)
    return {found.name: found for found in collector.features(names)}


def _require_lists(config: ImportConfig, wire: Sequence[WireFeature]) -> None:
    """Refuses what is asked of lists alone."""
    lists = {feature.name for feature in wire if feature.is_list}
    asked = {
        "aligned": [name for group in config.aligned for name in group],
        "order": [feature.name for feature in config.features if feature.turns],
    }
    for key, names in asked.items():
        scalars = [name for name in names if name not in lists]
        if scalars:
            raise InputDataError(
                f"`{key}` is of lists, and feature {scalars[0]!r} holds one value",
                allowed=", ".join(sorted(lists)) or "no feature is a list",
                fix="leave it out there, or give the feature its max_len",
            )


def _refuse_padding(config: ImportConfig, wire: Sequence[WireFeature]) -> None:
    """Refuses lists without a length whose missing values are not 0: scores would read zeros."""
    for feature, found in zip(config.features, wire, strict=True):
        is_unbounded = found.is_list and feature.length is None and feature.max_len is None
        if is_unbounded and feature.pad_value:
            raise InputDataError(
                f"feature {feature.name!r} is a list of any length, which is filled with 0 or ''",
                received=f"pad_value: {feature.pad_value!r}",
                allowed="a pad_value of its own for lists with a length or a max_len",
                fix="give it a max_len, or leave pad_value out",
            )


def _require(known: Mapping[str, WireFeature], name: str) -> WireFeature:
    if name not in known:
        raise InputDataError(
            f"no record holds a feature {name!r}",
            received=", ".join(known) or "records without any value",
            fix=did_you_mean(name, known) if known else "check that these are the right files",
        )
    return known[name]
