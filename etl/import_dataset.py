"""TFRecord files of one's own as a dataset version: surveyed, linked, published by a manifest.

No record is written anew, unless ids move (`imported_ids.py`). One pass over the files verifies
their checksums, decodes every declared feature and gathers the statistics; what the config leaves
open (types, lists, highest ids) is found by it. Needs no Spark.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    KEY_PREFIX,
    ColumnEncoding,
    EncoderPlan,
)
from conf.errors import ConfigError, InputDataError, did_you_mean, read_code_version
from conf.etl.imported import ImportConfig, ImportedFeatureConfig
from conf.manifest import (
    CountedKeys,
    DatasetKeys,
    InputFile,
    Manifest,
    RowCounts,
    RunInfo,
    ShardInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.paths import DatasetPaths, list_visible_files, local_path
from conf.schema import OOV_ID, PAD_ID, FeatureSchema, FeatureSpec, PackedSlot, fingerprint
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import Compression
from etl.imported_ids import (
    TokenCounts,
    count_ids,
    plan_moved_ids,
    refuse_special_ids,
    warn_of_sparse_ids,
    write_vocabularies,
)
from etl.quality.label_statistics import LabelFocus
from etl.quality.mistakes import find_not_finite, refuse_negative_weights
from etl.quality.statistics import (
    StatisticsAccumulator,
    merge_statistics,
    summarize_statistics,
)
from etl.quality.version_view import write_statistics
from etl.records.train_counts import TrainCounter, check_rows, write_counts
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression, read_record_blocks
from etl.tfrecord.codec.infer import infer_features
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter
from etl.tfrecord.types.features import WireFeature
from etl.versions.locks import sweep_leftovers
from etl.versions.publish import new_version_id, publish_version, read_current, stage_version
from etl.versions.stored import find_dataset
from etl.versions.working import hold_dataset, read_published

Files = Mapping[str, tuple[InputFile, ...]]
"""The files of each split, in the order of their names."""
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
logger = logging.getLogger("sluice.import")


@dataclass(frozen=True)
class ImportResult:
    """A published version.

    Attributes:
        version: Its directory; of one in a store, the copy.
        manifest: Its manifest.
        is_new: False where the current version holds these files already.
    """

    version: Path
    manifest: Manifest
    is_new: bool = True


def import_dataset(config: ImportConfig) -> ImportResult:
    """Publishes TFRecord files as a dataset version, unless the current one holds the same.

    Args:
        config: The files, their features, and where the dataset lies.

    Raises:
        InputDataError: A file is missing, damaged or changes meanwhile, a split has no record, or
            records do not hold the features as they are declared.
        UpstreamNotReadyError: Another build of this dataset is running, or was faster.
        ConfigError: The store that the dataset lies in cannot be reached or refuses.
    """
    files = find_files(config)
    features = plan_features(config, files)
    run = RunInfo(_fingerprint(config, files))
    with hold_dataset(find_dataset(config.output.root, config.name)) as paths:
        sweep_leftovers(paths)
        parent = read_current(paths)
        _refuse_built(paths, parent)
        same = _find_same(paths, parent, run)
        if same is not None:
            return same
        version_id = new_version_id(run.fingerprint)
        with stage_version(paths, version_id) as staging:
            survey = _Survey(features, staging)
            surveyed = {
                split: [survey.read(split, n, file) for n, file in enumerate(listed)]
                for split, listed in files.items()
            }
            _check_unchanged(files)
            manifest = _describe(survey, files, surveyed)
            manifest = _complete(manifest, version_id, parent, run)
            version = publish_version(paths, staging, manifest)
    return ImportResult(version, manifest)


def _refuse_built(paths: DatasetPaths, parent: str | None) -> None:
    """Keeps apart what `sluice build` makes: its next version goes on from the current one."""
    if parent is None:
        return
    try:
        manifest = read_published(paths, parent)
    except InputDataError:
        return
    if "sources" in manifest.source.config:
        raise ConfigError(
            f"dataset {paths.name!r} is made by `sluice build`",
            received=str(paths.version(parent)),
            fix="import under another name, or into another output.root",
        )


def find_files(config: ImportConfig) -> Files:
    """Lists the files of each split; hidden ones (`.` or `_` in front) do not count.

    Raises:
        InputDataError: A path names no file, or a file is in two splits.
    """
    root = local_path(config.data_dir)
    found: dict[str, tuple[InputFile, ...]] = {
        split: tuple(
            _describe_input(split, path)
            for path in sorted({file for name in names for file in _expand(root, split, name)})
        )
        for split, names in config.splits.items()
    }
    seen: dict[str, str] = {}
    for split, listed in found.items():
        for file in listed:
            if seen.setdefault(file.path, split) != split:
                raise InputDataError(
                    f"a file is in the splits {seen[file.path]} and {split}",
                    received=file.path,
                    fix="correct the globs of `splits`",
                )
    return found


def _expand(root: Path, split: str, name: str) -> list[Path]:
    asked = Path(local_path(name))
    path = root / asked
    matches = [path] if path.exists() else _match_visible(root, asked)
    files = [
        file
        for match in matches
        for file in (list_visible_files(match) if match.is_dir() else [match])
    ]
    kept = [file.resolve() for file in files if file.is_file()]
    if not kept:
        raise InputDataError(
            f"split {split}: no such file",
            received=path,
            allowed="a file, a folder or a glob; names with . or _ in front do not count",
            fix=f"correct splits.{split}, or give the folder by --data",
        )
    return kept


def _match_visible(root: Path, asked: Path) -> list[Path]:
    """Returns what a glob matches, without what lies in hidden folders that it does not name."""
    found = [Path(name) for name in glob.glob(str(asked), root_dir=root, recursive=True)]  # noqa: PTH207
    return [
        root / path
        for path in found
        if not any(part[0] in "._" for part in path.parts if part not in asked.parts)
    ]


def _describe_input(split: str, path: Path) -> InputFile:
    stat = path.stat()
    state = f"{stat.st_mtime_ns}.{stat.st_ino}"
    return InputFile(split, str(path), stat.st_size, stat.st_mtime_ns // 1_000_000, state)


def _check_unchanged(files: Files) -> None:
    for listed in files.values():
        for file in listed:
            if _describe_input(file.source, Path(file.path)) != file:
                raise InputDataError(
                    "a file was written while it was imported",
                    received=file.path,
                    fix="wait until the program that writes it has ended, and import again",
                )


def _fingerprint(config: ImportConfig, files: Files) -> str:
    resolved = {k: v for k, v in config.resolved().items() if k not in ("data_dir", "output")}
    inputs = [(f.source, f.path, f.bytes, f.state) for listed in files.values() for f in listed]
    how = config.output.files
    return fingerprint(
        {"config": resolved, "files": how, "inputs": inputs, "code": read_code_version()}
    )


def _find_same(paths: DatasetPaths, parent: str | None, run: RunInfo) -> ImportResult | None:
    """The current version, where it holds the same files, undamaged."""
    if parent is None:
        return None
    try:
        manifest = read_published(paths, parent)
    except InputDataError:
        return None
    is_same = manifest.run is not None and manifest.run.fingerprint == run.fingerprint
    return ImportResult(paths.version(parent), manifest, is_new=False) if is_same else None


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
        found = next((f for f in self.wire if f.name == label), None)
        is_number = found is not None and not found.is_list and found.kind != "bytes"
        if found is None or not is_number:
            return None
        labels = tuple(f.name for f in self.config.features if f.role == "label")
        weighted = tuple(dict.fromkeys((found.name, *labels)))
        return LabelFocus(found.name, (), self.config.find_key("weight"), weighted)

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


@dataclass(frozen=True)
class _Surveyed:
    """A file that was read through, and linked into the version."""

    info: ShardInfo
    statistics: dict[str, Any]
    compression: Compression | None


class _Survey:
    """Reads files through, and brings them into the version.

    Args:
        features: How features lie in the records.
        staging: Directory of the version to be.

    Attributes:
        counts: How often ids that move occur in train records.
        keys: Counts users and items of train records.
    """

    def __init__(self, features: ImportedFeatures, staging: Path) -> None:
        self.keys = features.build_counter()
        self.features, self.staging = features, staging
        self._moved = plan_moved_ids(features.config)
        self.counts = TokenCounts(features.config, [f.name for f in features.wire if f.is_list])

    def read(self, split: str, number: int, file: InputFile) -> _Surveyed:
        """Reads a file, and links, copies or writes it anew."""
        source, config = Path(file.path), self.features.config
        decoder = build_decoder(self.features.wire, "Example", self.features.slots)
        statistics, rows = StatisticsAccumulator(decoder.schema, self.features.focus), 0
        target = self.staging / split / f"{number:05d}-{source.name}"
        target.parent.mkdir(exist_ok=True)
        compression = _read_compression(source)
        with contextlib.ExitStack() as stack:
            writer = None
            if config.moves_ids:
                options = ShardOptions(compression=compression)
                writer = stack.enter_context(TableWriter(target, decoder.schema, options))
            for block in read_record_blocks(file.path):
                batch = self._moved.apply(decoder.decode_block(block, file.path))
                statistics.update(batch)
                rows += batch.num_rows
                if split == "train":
                    self.counts.update(batch)
                    self.keys.update(batch)
                if writer is not None:
                    writer.write(batch)
        if not config.moves_ids:
            _bring(source, target, config.output.files)
        found = describe_file(self.staging, target)
        info = ShardInfo(found.path, rows, found.bytes, found.crc32c)
        return _Surveyed(info, statistics.to_dict(), compression if rows else None)


def _read_compression(path: Path) -> Compression | None:
    with path.open("rb") as handle:
        return detect_compression(handle.read(HEADER_BYTES))


def _bring(source: Path, target: Path, how: str) -> None:
    if how == "copy":
        shutil.copyfile(source, target)
        with target.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.symlink_to(source)


def _describe(
    survey: _Survey, files: Files, surveyed: Mapping[str, Sequence[_Surveyed]]
) -> Manifest:
    """The manifest of the files, but for what names the version."""
    features, staging = survey.features, survey.staging
    config = features.config
    rows = {split: sum(shard.info.rows for shard in found) for split, found in surveyed.items()}
    events = sum(count for split, count in rows.items() if split not in ("catalog", "users"))
    for split, count in rows.items():
        if not count:
            raise InputDataError(
                f"the files of split {split} hold no record",
                received=", ".join(file.path for file in files[split]),
                fix=f"correct splits.{split}, or leave the split out",
            )
    merged = {s: merge_statistics([f.statistics for f in found]) for s, found in surveyed.items()}
    statistics_file = write_statistics(staging, merged)
    counts = survey.keys.result()
    check_rows(counts, rows["train"])
    plan = _write_encoders(survey, _build_schema(features, merged))
    schema = plan.schema
    refuse_negative_weights(schema, merged)
    for line in find_not_finite(merged):
        logger.warning("%s", line)
    keys = {**dict(config.keys), **{r: config.find_key(r) for r in ("label", "weight")}}
    return Manifest(
        dataset_name=config.name,
        dataset_version="",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        record_type="Example",
        compression=_find_compression(surveyed),
        splits=tuple(
            SplitInfo(split, tuple(shard.info for shard in found))
            for split, found in surveyed.items()
        ),
        schema=schema,
        keys=DatasetKeys(**keys),
        encoder_files=tuple(
            describe_file(staging, staging / ENCODERS_DIR / file)
            for file in (ENCODERS_FILE, *(spec.file for spec in plan.vocabularies))
        ),
        encoders_fingerprint=plan.fingerprint,
        statistics={split: summarize_statistics(found) for split, found in merged.items()},
        label_rate=_means(merged, keys["label"]),
        label_rates={
            spec.name: _means(merged, spec.name)
            for spec in schema.by_role("label")
            if spec.name != keys["label"] and _is_binary(merged["train"][spec.name])
        },
        source=SourceSnapshot(
            inputs=tuple(file for listed in files.values() for file in listed),
            event_ts_ms_range=None,
            config=config.resolved(),
            config_sha256=fingerprint(config.resolved()),
        ),
        counts=RowCounts({"files": events}, {"files": {}}, events, rows, {}),
        code_version=read_code_version(),
        statistics_file=describe_file(staging, statistics_file),
        slots=() if config.moves_ids else features.slots,
        train_counts=write_counts(survey.staging, counts),
    )


def _write_encoders(survey: _Survey, schema: FeatureSchema) -> EncoderPlan:
    """Writes how features come from the files' values: as they are, or by a vocabulary."""
    directory, config = survey.staging / ENCODERS_DIR, survey.features.config
    directory.mkdir()
    written = write_vocabularies(directory, config, schema.features, survey.counts)
    encodings = {
        feature.name: written[feature.table_name].name
        for feature in config.features
        if feature.offset
    }
    features = tuple(
        replace(spec, encoding=encodings.get(spec.name, spec.encoding)) for spec in schema.features
    )
    plan = EncoderPlan(
        FeatureSchema(features),
        tuple(ColumnEncoding(f.name, f.name, f.dtype, f.encoding) for f in features),
        vocabularies=tuple(written.values()),
    )
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    return plan


def _complete(manifest: Manifest, version_id: str, parent: str | None, run: RunInfo) -> Manifest:
    return replace(manifest, dataset_version=version_id, parent=parent, run=run)


def _find_compression(
    surveyed: Mapping[str, Sequence[_Surveyed]],
) -> Literal["gzip", "zlib"] | None:
    shards = [shard for found in surveyed.values() for shard in found if shard.info.rows]
    kinds = {shard.compression for shard in shards}
    if len(kinds) > 1:
        examples = {shard.compression or "plain": shard.info.path for shard in shards}
        raise InputDataError(
            "the files are compressed in different ways",
            received=", ".join(f"{kind}: {path}" for kind, path in examples.items()),
            allowed="all plain, all gzip, or all zlib",
            fix="convert some of them by `sluice convert`, or import two datasets",
        )
    return _COMPRESSIONS[kinds.pop()]


_COMPRESSIONS: dict[str | None, Literal["gzip", "zlib"] | None] = {
    None: None,
    "GZIP": "gzip",
    "ZLIB": "zlib",
}


_ROLE_OF_SPLIT = {"catalog": "item", "users": "user"}
"""Splits whose records hold one side alone."""


def _build_schema(
    features: ImportedFeatures, statistics: Mapping[str, Mapping[str, Any]]
) -> FeatureSchema:
    specs = []
    for config, wire in zip(features.config.features, features.wire, strict=True):
        found = [
            by_feature[config.name]
            for split, by_feature in statistics.items()
            if _ROLE_OF_SPLIT.get(split, config.role) == config.role
        ]
        _check_present(config, wire, found)
        specs.append(_build_spec(config, wire, found, features.config.declares_ids(config)))
    return FeatureSchema(_share_sizes(specs))


def _build_spec(
    config: ImportedFeatureConfig,
    wire: WireFeature,
    found: Sequence[Mapping[str, Any]],
    is_declared: bool,
) -> FeatureSpec:
    shape: tuple[int | None, ...] = (config.length,) if wire.is_list else ()
    are_ids = config.reads_as_ids(wire.kind)
    spec = FeatureSpec(
        name=config.name,
        dtype=wire.kind,
        role=config.role,
        shape=shape,
        max_len=config.max_len,
        vocabulary_size=count_ids(config, found) if are_ids else None,
        shared_embedding=config.table,
        pad_value=config.pad_value,
    )
    if not are_ids and not config.are_keys:
        return spec
    refuse_special_ids(config, found, is_list=wire.is_list, is_declared=is_declared)
    warn_of_sparse_ids(spec, found)
    if are_ids:
        return spec
    absent = PAD_ID if wire.is_list else OOV_ID
    return replace(spec, encoding=f"{KEY_PREFIX}{spec.name}", pad_value=absent)


def _share_sizes(specs: Sequence[FeatureSpec]) -> tuple[FeatureSpec, ...]:
    """Gives the features of a table its greatest number of ids."""
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.table] = max(sizes.get(spec.table, 0), spec.vocabulary_size or 0)
    return tuple(
        spec if spec.vocabulary_size is None else replace(spec, vocabulary_size=sizes[spec.table])
        for spec in specs
    )


def _check_present(
    config: ImportedFeatureConfig, wire: WireFeature, found: Sequence[Mapping[str, Any]]
) -> None:
    """Refuses what training would stop at: absent values, and lists of another length."""
    rows, missing = (sum(one[key] for one in found) for key in ("rows", "missing"))
    if missing == rows:
        raise InputDataError(
            f"no record holds feature {config.name!r}",
            received=f"{rows:,} records without it",
            fix="correct its name, or leave it out of `features`",
        )
    are_ids = config.reads_as_ids(wire.kind) or config.are_keys
    is_optional = config.pad_value is not None or are_ids
    is_required = config.length is not None or not wire.is_list
    if missing and is_required and not is_optional:
        raise InputDataError(
            f"records lack feature {config.name!r}",
            received=f"{missing:,} of {rows:,} records",
            fix="give it a pad_value, which stands for an absent value",
        )
    if config.length is None:
        return
    lengths = {one["length"][key] for one in found for key in ("min", "max")} - {None}
    allowed = {config.length, 0} if is_optional else {config.length}
    if not lengths <= allowed:
        raise InputDataError(
            f"lists of feature {config.name!r} are not of the declared length",
            received=f"{min(lengths)} to {max(lengths)} values",
            allowed=f"length: {config.length}",
            fix="correct its length, or declare max_len for lists of any length",
        )


def _means(statistics: Mapping[str, Mapping[str, Any]], label: str | None) -> dict[str, float]:
    if label is None:
        return {}
    found = {split: by_feature[label].get("mean") for split, by_feature in statistics.items()}
    return {split: float(mean) for split, mean in found.items() if mean is not None}


def _is_binary(feature: Mapping[str, Any]) -> bool:
    bounds = {feature.get("min"), feature.get("max")}
    return bounds <= {0, 1} and feature["distinct"]["count"] <= 2
