"""How declared features lie in records: what is declared, and what the records tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conf.errors import InputDataError, did_you_mean
from conf.etl.imported import ImportConfig
from conf.manifest import CountedKeys
from conf.schema import PackedSlot
from etl.imported.files import Files
from etl.quality.label_statistics import LabelFocus
from etl.records.train_counts import TrainCounter
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.types.features import WireFeature


@dataclass(frozen=True)
class ImportedFeatures:
    """How the declared features lie in the records.

    Attributes:
        config: The config.
        wire: What is decoded, in the order of the config.
        slots: Places of scalars that share a list.
    """

    config: ImportConfig
    wire: tuple[WireFeature, ...]
    slots: tuple[PackedSlot, ...]

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
        CorruptRecordError: A file is damaged, or holds no `tf.train.Example`.
        InputDataError: No record holds a feature, records hold several kinds of values, or other
            than whole numbers as ids.
    """
    slots = tuple(
        PackedSlot(name, packed, offset)
        for packed, names in config.packed.items()
        for offset, name in enumerate(names)
    )
    keys = {slot.feature: slot.packed for slot in slots}
    known: dict[str, WireFeature] = {}
    if any(feature.dtype is None for feature in config.features):
        paths = [file.path for listed in files.values() for file in listed]
        known = {found.name: found for found in infer_features(paths)}
    wire = []
    for feature in config.features:
        dtype, is_list = feature.dtype, feature.length is not None or feature.max_len is not None
        if dtype is None:
            found = _require(known, keys.get(feature.name, feature.name))
            is_list = is_list or (found.is_list and feature.name not in keys)
            dtype = found.kind
        if (feature.reads_as_ids(dtype) or feature.are_keys) and dtype != "int64":
            raise InputDataError(
                f"feature {feature.name!r} holds no ids",
                received=dtype,
                allowed="int64",
                fix="leave out its `ids`, `offset` and `vocabulary_size`",
            )
        wire.append(WireFeature(feature.name, dtype, is_list))
    return ImportedFeatures(config, tuple(wire), slots)


def _require(known: Mapping[str, WireFeature], name: str) -> WireFeature:
    if name not in known:
        raise InputDataError(
            f"no record holds a feature {name!r}",
            received=", ".join(known) or "records without any value",
            fix=did_you_mean(name, known) if known else "check that these are the right files",
        )
    return known[name]
