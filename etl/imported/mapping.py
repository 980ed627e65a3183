"""What is imported: the files of each split, and how the declared features lie in their records.

A `tf.train.SequenceExample` without feature lists has the bytes of a `tf.train.Example`: the type
of records is that of whole files.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from conf.encoders import KEY_PREFIX
from conf.errors import InputDataError, did_you_mean
from conf.etl.imported import ImportConfig, ImportedFeatureConfig
from conf.local_paths import is_hidden, local_path
from conf.manifest import SEQUENCE_RECORDS, DatasetKeys, InputFile
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSchema, FeatureSpec, PackedSlot
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.codec.infer import FeatureCollector, count_feature_lists
from etl.tfrecord.commit.output_directory import list_complete
from etl.tfrecord.types.features import WireFeature


def find_files(config: ImportConfig) -> list[InputFile]:
    """Lists the files, split by split and by name; hidden ones (`.` or `_` in front) not."""
    root = local_path(config.data_dir)
    files: dict[str, InputFile] = {}
    for split, names in config.splits.items():
        for path in sorted({path for name in names for path in _expand(root, split, name)}):
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


def _expand(root: Path, split: str, name: str) -> list[Path]:
    asked = Path(local_path(name))
    path = root / asked
    found: list[Path] = []
    for match in [path] if path.exists() else _match_visible(root, asked):
        found += [match / file for file in list_complete(match)] if match.is_dir() else [match]
    if files := [file.resolve() for file in found if file.is_file()]:
        return files
    raise InputDataError(
        f"split {split}: no such file",
        received=path,
        allowed="a file, a folder or a glob; names with . or _ in front do not count",
        fix=f"correct splits.{split}, or give the folder by --data",
    )


def _match_visible(root: Path, asked: Path) -> list[Path]:
    """Returns what a glob matches, without what lies in hidden folders that it does not name."""
    matches = map(Path, glob.glob(str(asked), root_dir=root, recursive=True))  # noqa: PTH207
    return [
        root / match
        for match in matches
        if not any(
            part not in asked.parts and is_hidden(part, is_folder=part != match.name)
            for part in match.parts
        )
    ]


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
    record_type: Literal["Example", "SequenceExample"]

    @property
    def schema(self) -> FeatureSchema:
        """The features, the numbers of their ids still open."""
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
        """Places of scalars that share a list."""
        packed = self.config.packed.items()
        return tuple(PackedSlot(f, key, n) for key, names in packed for n, f in enumerate(names))

    @property
    def keys(self) -> DatasetKeys:
        """The feature of each part; label and weight are the first of their role."""
        roles = {f.role: f.name for f in reversed(self.config.features)}
        label, weight = roles.get("label"), roles.get("weight")
        return DatasetKeys(**dict(self.config.keys), label=label, weight=weight)

    def check_file(self, file: InputFile, rows: int, with_lists: int) -> None:
        """Refuses a file of the other record type; `with_lists` of its rows hold feature lists."""
        is_sequence = self.record_type == SEQUENCE_RECORDS
        # Records of items alone need no sequence.
        is_free = file.source == "catalog" or self.config.record_type is not None
        if with_lists and not is_sequence:
            raise InputDataError(
                f"{file.path} holds tf.train.SequenceExample: its feature lists would be left out",
                received=f"feature lists in {with_lists:,} records",
                fix="set `record_type: SequenceExample`, or leave it out",
            )
        if is_sequence and rows and not with_lists and not is_free:
            raise InputDataError(
                f"{file.path} holds tf.train.Example, and other files tf.train.SequenceExample",
                received=f"feature lists in none of {rows:,} records",
                fix="import two datasets; if they are SequenceExamples without a step, set "
                "`record_type: SequenceExample`",
            )


def map_records(config: ImportConfig, files: Sequence[InputFile]) -> RecordMapping:
    """Maps the declared features; looks through the files for what is not declared."""
    packed = {name: key for key, names in config.packed.items() for name in names}
    record_type = config.record_type or "Example"
    known: dict[str, WireFeature] = {}
    if config.record_type != "Example" or any(f.dtype is None for f in config.features):
        names = {packed.get(feature.name, feature.name) for feature in config.features}
        record_type, known = _look(config, files, names)
    features = tuple(_map_feature(f, packed.get(f.name), known) for f in config.features)
    mapping = RecordMapping(config, features, record_type)
    _check_lists(mapping)
    return mapping


def _map_feature(
    config: ImportedFeatureConfig, packed: str | None, known: Mapping[str, WireFeature]
) -> MappedFeature:
    key = packed or config.name
    found = known.get(key)
    if found is None and config.dtype is None:
        raise InputDataError(
            f"no record holds a feature {key!r}",
            received=", ".join(known) or "records without any value",
            fix=did_you_mean(key, known) if known else "check that these are the right files",
        )
    kind = config.dtype or (found.kind if found else "bytes")
    is_sequence = found is not None and found.is_sequence and packed is None
    is_found_list = found is not None and found.is_list and packed is None and config.dtype is None
    is_list = config.is_list or is_sequence or is_found_list
    are_ids = config.reads_as_ids(kind)
    if (are_ids or config.are_keys) and kind != "int64":
        raise InputDataError(
            f"feature {config.name!r} holds no ids",
            received=kind,
            fix="leave out its `ids`, `offset` and `vocabulary_size`",
        )
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


def _look(
    config: ImportConfig, files: Sequence[InputFile], names: set[str]
) -> tuple[Literal["Example", "SequenceExample"], dict[str, WireFeature]]:
    """Reads files through: the type of their records, and what these hold of some features."""
    collector = FeatureCollector(config.record_type or SEQUENCE_RECORDS)
    with_lists = 0
    for file in files:
        for block in read_record_blocks(file.path):
            collector.update(block, file.path)
            with_lists += count_feature_lists(block)
    record_type = config.record_type or (SEQUENCE_RECORDS if with_lists else "Example")
    return record_type, {found.name: found for found in collector.features(names)}


def _check_lists(mapping: RecordMapping) -> None:
    """Refuses lists where there is to be one value, and the other way round."""
    config, keys = mapping.config, (mapping.config.keys.user, mapping.config.keys.item)
    aligned = {name for group in config.aligned for name in group}
    for feature in mapping.features:
        name, declared, is_list = feature.name, feature.config, feature.spec.is_list
        # Scores would read zeros where batches are filled with something else.
        if is_list and not declared.is_list and declared.pad_value:
            raise InputDataError(
                f"feature {name!r} is a list of any length, which is filled with 0 or ''",
                received=f"pad_value: {declared.pad_value!r}",
                fix="give it a max_len, or leave pad_value out",
            )
        # A row has one user and item; lists alone turn, and are aligned.
        is_wrong = name in keys if is_list else declared.turns or name in aligned
        if is_wrong:
            raise InputDataError(
                f"feature {name!r} holds {'several values' if is_list else 'one value'}",
                received="keys.user, keys.item" if is_list else "order, aligned",
                fix="name another feature there; a max_len makes a feature a list",
            )
