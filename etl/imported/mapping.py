"""What is imported: the files of each split, and how the declared features lie in their records.

A `tf.train.SequenceExample` without feature lists has the bytes of a `tf.train.Example`: the type
of records is that of whole files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from conf.encoders import KEY_PREFIX
from conf.errors import InputDataError, did_you_mean
from conf.etl.imported import ImportConfig, ImportedFeatureConfig
from conf.local_paths import local_path, match_visible
from conf.manifest import SEQUENCE_RECORDS, DatasetKeys, InputFile
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSchema, FeatureSpec, PackedSlot
from conf.splits import CATALOG, USERS
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector, count_feature_lists
from etl.tfrecord.commit.output_directory import list_complete
from etl.tfrecord.types.features import WireFeature

MOST_IDS = 100_000_000
"""Ids of a table whose number nobody declared: 25 GB of rows of 64 numbers."""
_ROLE_OF_SPLIT = {CATALOG: "item", USERS: "user"}
"""Splits whose records hold one side alone."""
RecordType = Literal["Example", "SequenceExample"]
Found = Sequence[Mapping[str, Any]]
"""Statistics of a feature, of each split that holds it."""


def find_files(config: ImportConfig) -> list[InputFile]:
    """Lists the files, split by split and by name; hidden ones (`.` or `_` in front) not."""
    root = local_path(config.data_dir)
    files: dict[str, InputFile] = {}
    for split, names in config.splits.items():
        for path in sorted({path for name in names for path in _find(root, split, name)}):
            file = describe_input(split, path)
            if files.setdefault(file.path, file) is not file:
                raise InputDataError(
                    f"a file is in the splits {files[file.path].source} and {split}",
                    received=path,
                    fix="correct the globs of `splits`",
                )
    return list(files.values())


def describe_input(split: str, path: Path) -> InputFile:
    """Describes a file by what changes when it is written, but not when it is linked."""
    stat = path.stat()
    state = f"{stat.st_mtime_ns}.{stat.st_ino}"
    return InputFile(split, str(path), stat.st_size, stat.st_mtime_ns // 1_000_000, state)


def _find(root: Path, split: str, name: str) -> list[Path]:
    asked = local_path(name)
    matches = [asked] if (root / asked).exists() else match_visible(root, asked, is_recursive=True)
    found: list[Path] = []
    for match in (root / path for path in matches):
        found += [match / file for file in list_complete(match)] if match.is_dir() else [match]
    if files := [file.resolve() for file in found if file.is_file()]:
        return files
    raise InputDataError(
        f"split {split}: no such file, and no visible one in it",
        received=root / asked,
        fix=f"correct splits.{split}, or give the folder by --data",
    )


@dataclass(frozen=True)
class MappedFeature:
    """A declared feature: as the schema has it, of ids the number still open, and as it lies."""

    config: ImportedFeatureConfig
    spec: FeatureSpec
    wire: WireFeature

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def are_ids(self) -> bool:
        return self.spec.vocabulary_size is not None

    @property
    def is_embedded(self) -> bool:
        """Whether its values name rows of a table: ids, or keys of 64 bits."""
        return self.are_ids or self.config.are_keys

    @property
    def offset(self) -> int:
        return self.config.offset or 0

    @property
    def pad(self) -> int:
        """What pads a list of its ids in the files."""
        return OOV_ID - self.offset if self.offset else PAD_ID


@dataclass(frozen=True)
class RecordMapping:
    """How the declared features lie in the records, which are of one type."""

    config: ImportConfig
    features: tuple[MappedFeature, ...]
    record_type: RecordType

    @property
    def schema(self) -> FeatureSchema:
        return FeatureSchema(tuple(feature.spec for feature in self.features))

    @property
    def arrow_schema(self) -> pa.Schema:
        """A column per feature: a value, or a list of values."""
        wire = (replace(feature.wire, is_sequence=False) for feature in self.features)
        return pa.schema([(one.name, one.arrow_type) for one in wire])

    @property
    def feature_lists(self) -> tuple[str, ...]:
        """Features that stand in the feature lists of SequenceExamples."""
        return tuple(feature.name for feature in self.features if feature.wire.is_sequence)

    @property
    def slots(self) -> tuple[PackedSlot, ...]:
        packed = self.config.packed.items()
        return tuple(PackedSlot(f, key, n) for key, names in packed for n, f in enumerate(names))

    @property
    def keys(self) -> DatasetKeys:
        roles = {f.role: f.name for f in reversed(self.config.features)}
        label, weight = roles.get("label"), roles.get("weight")
        return DatasetKeys(**dict(self.config.keys), label=label, weight=weight)

    def check_file(self, file: InputFile, rows: int, with_lists: int) -> None:
        """Refuses a file of the other record type; `with_lists` of its rows hold feature lists."""
        is_sequence = self.record_type == SEQUENCE_RECORDS
        # Records of items alone need no sequence, nor do those of a type that is declared.
        may_lack = file.source == CATALOG or self.config.record_type is not None or not rows
        fits = (with_lists or may_lack) if is_sequence else not with_lists
        if not fits:
            raise InputDataError(
                f"{file.path} holds other records than {self.record_type}",
                received=f"feature lists in {with_lists:,} of {rows:,} records",
                fix="import two datasets, or set `record_type: SequenceExample`",
            )


def map_records(config: ImportConfig, files: Sequence[InputFile]) -> RecordMapping:
    """Maps the declared features; looks through the files for what is not declared."""
    packed = {name: key for key, names in config.packed.items() for name in names}
    record_type: RecordType = config.record_type or "Example"
    known: dict[str, WireFeature] = {}
    if config.record_type != "Example" or any(f.dtype is None for f in config.features):
        names = {packed.get(feature.name, feature.name) for feature in config.features}
        record_type, known = _look(config, files, names)
    features = tuple(_map_feature(f, packed.get(f.name), known) for f in config.features)
    for feature in features:
        _check_list(config, feature)
    return RecordMapping(config, features, record_type)


def _look(
    config: ImportConfig, files: Sequence[InputFile], names: set[str]
) -> tuple[RecordType, dict[str, WireFeature]]:
    """Reads files through: the type of their records, and what these hold of some features."""
    collector = FeatureCollector(config.record_type or SEQUENCE_RECORDS)
    with_lists = 0
    for file in files:
        for block in read_record_blocks(file.path):
            collector.update(block, file.path)
            with_lists += count_feature_lists(block)
    record_type = config.record_type or (SEQUENCE_RECORDS if with_lists else "Example")
    return record_type, {found.name: found for found in collector.features(names)}


def _map_feature(
    config: ImportedFeatureConfig, packed: str | None, known: Mapping[str, WireFeature]
) -> MappedFeature:
    name = packed or config.name
    found = known.get(name) or (WireFeature(name, config.dtype) if config.dtype else None)
    if found is None:
        raise InputDataError(f"no record holds a feature {name!r}", fix=did_you_mean(name, known))
    kind = config.dtype or found.kind
    are_ids = config.reads_as_ids(kind)
    if (are_ids or config.are_keys) and kind != "int64":
        raise InputDataError(
            f"feature {config.name!r} holds {kind}, and no ids",
            fix="leave out its `ids`, `offset` and `vocabulary_size`",
        )
    # A packed scalar is one value of the list that it was found in.
    is_sequence = found.is_sequence and packed is None
    is_listed = found.is_list and packed is None and config.dtype is None
    is_list = config.is_list or is_sequence or is_listed
    spec = FeatureSpec(
        name=config.name,
        dtype=kind,
        role=config.role,
        shape=(config.length,) if is_list else (),
        max_len=config.max_len,
        encoding=f"{KEY_PREFIX}{config.name}" if config.are_keys else "identity",
        vocabulary_size=FIRST_TOKEN_ID if are_ids else None,
        shared_embedding=config.table,
        pad_value=(PAD_ID if is_list else OOV_ID) if config.are_keys else config.pad_value,
    )
    return MappedFeature(config, spec, WireFeature(config.name, kind, is_list, is_sequence))


def _check_list(config: ImportConfig, feature: MappedFeature) -> None:
    """Refuses lists where there is to be one value, and the other way round."""
    name, declared, is_list = feature.name, feature.config, feature.spec.is_list
    # Scores would read zeros where batches are filled with something else.
    if is_list and not declared.is_list and declared.pad_value:
        raise InputDataError(
            f"feature {name!r} is a list of any length, which is filled with 0 or ''",
            received=f"pad_value: {declared.pad_value!r}",
            fix="give it a max_len, or leave pad_value out",
        )
    # A row has one user and item; lists alone turn, and are aligned.
    is_key = name in (config.keys.user, config.keys.item)
    is_over_time = declared.turns or any(name in group for group in config.aligned)
    if is_key if is_list else is_over_time:
        raise InputDataError(
            f"feature {name!r} holds {'several values' if is_list else 'one value'}",
            received="keys.user, keys.item" if is_list else "order, aligned",
            fix="name another feature there; a max_len makes a feature a list",
        )


def build_schema(
    mapping: RecordMapping, statistics: Mapping[str, Mapping[str, Any]]
) -> FeatureSchema:
    """Completes the schema by the statistics of the records, which it holds against the config."""
    sizes: dict[str, int] = {}  # Of the tables that features share.
    settled = {f.spec.table for f in mapping.features if f.config.offset is not None}
    special: list[str] = []
    for feature in mapping.features:
        role, table = feature.config.role, feature.spec.table
        splits = [split for split in statistics if _ROLE_OF_SPLIT.get(split, role) == role]
        found = [statistics[split][feature.name] for split in splits]
        _check_present(feature, found)
        if feature.are_ids:
            sizes[table] = max(sizes.get(table, 0), _count_ids(feature, found))
        if feature.is_embedded and table not in settled:
            special += _find_special_ids(feature, found)
    if special:
        raise InputDataError(
            "features hold what Sluice reads as padding (0) or as an absent value (1)",
            received="; ".join(special),
            fix="set `offset`: 2 where ids start at 0, 1 where they start at 1 and 0 is none, 0 "
            "where 0 and 1 are none already; or `ids: false` if the values are numbers",
        )
    specs = (
        replace(f.spec, vocabulary_size=sizes[f.spec.table]) if f.are_ids else f.spec
        for f in mapping.features
    )
    return FeatureSchema(tuple(specs))


def _check_present(feature: MappedFeature, found: Found) -> None:
    """Refuses what training would stop at: absent values, and lists of another length."""
    spec, length = feature.spec, feature.config.length
    rows, missing = (sum(one[key] for one in found) for key in ("rows", "missing"))
    is_optional = feature.config.pad_value is not None or feature.is_embedded
    is_required = not is_optional and (length is not None or not spec.is_list)
    if missing == rows or (missing and is_required):
        raise InputDataError(
            f"{missing:,} of {rows:,} records lack feature {spec.name!r}",
            fix="correct its name, or give it a pad_value, which stands for an absent value",
        )
    lengths = {one["length"][key] for one in found for key in ("min", "max") if length} - {None}
    if not lengths <= ({length, 0} if is_optional else {length}):
        raise InputDataError(
            f"lists of feature {spec.name!r} have {min(lengths)} to {max(lengths)} values",
            fix="correct its length, or declare max_len for lists of any length",
        )


def _count_ids(feature: MappedFeature, found: Found) -> int:
    """Number of a feature's ids, 0 for padding and 1 for absent values included."""
    offset, declared = feature.offset, feature.config.vocabulary_size
    lowest = int(min((one["min"] for one in found if one["min"] is not None), default=0))
    highest = int(max((one["max"] for one in found if one["max"] is not None), default=0))
    size = max(highest + 1 if declared is None else declared + offset, FIRST_TOKEN_ID)
    # A vocabulary has a row in a file for each id, whatever is declared.
    most = size if declared is not None and not offset else MOST_IDS
    if lowest < 0 or highest >= size or size > most:
        raise InputDataError(
            f"feature {feature.name!r} holds ids outside its table",
            received=lowest if lowest < 0 else max(highest, size - 1) - offset,
            allowed=f"{FIRST_TOKEN_ID - offset if offset else 0} to {min(size, most) - offset - 1}",
            fix="correct `vocabulary_size` or `offset`; set `ids: false` for numbers, `ids: keys` "
            f"for hashes (train with model.embeddings.{feature.spec.table}.kind=dynamic)",
        )
    return size


def _find_special_ids(feature: MappedFeature, found: Found) -> Iterator[str]:
    """Ids that Sluice reads as none; in a list, 0 may well be padding."""
    for id_, key in ((1, "oov"),) if feature.spec.is_list else ((0, "zeros"), (1, "oov")):
        if times := sum(one[key] for one in found):
            yield f"{feature.name}: {id_} ({times:,} times)"
