"""TFRecord files of one's own as a dataset version: surveyed, linked, published by a manifest.

No record is written anew, unless ids move (`imported/ids.py`) or lists turn. One pass over the
files verifies their checksums, decodes every declared feature and gathers the statistics; what the
config leaves open (types, lists, highest ids) is found by it. Needs no Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from conf.artefacts.dataset import DatasetPaths
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, ColumnEncoding, EncoderPlan
from conf.errors import ConfigError, InputDataError, read_code_version
from conf.etl.imported import ImportConfig
from conf.manifest import (
    SEQUENCE_RECORDS,
    DatasetKeys,
    Manifest,
    RowCounts,
    RunInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.publication.entries import stage_entry
from conf.schema import FeatureSchema, fingerprint
from conf.storage.atomic_output import write_text_atomic
from etl.imported.features import plan_features
from etl.imported.files import Files, check_unchanged, find_files
from etl.imported.ids import write_vocabularies
from etl.imported.schema import build_schema
from etl.imported.survey import Survey, Surveyed
from etl.quality.statistics import (
    count_labelled,
    find_not_finite,
    find_unscaled,
    merge_statistics,
    refuse_negative_weights,
    summarize_statistics,
)
from etl.quality.version_view import write_statistics
from etl.records.train_counts import check_rows, write_counts
from etl.tfrecord.codec.crc32c import describe_file
from etl.versions.publish import (
    find_dataset,
    hold_dataset,
    new_version_id,
    publish_version,
    read_current,
    read_published,
    sweep_leftovers,
)

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
        with stage_entry(paths.versions, version_id) as staging:
            survey = Survey(features, staging)
            surveyed = {
                split: [survey.read(split, n, file) for n, file in enumerate(listed)]
                for split, listed in files.items()
            }
            check_unchanged(files)
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


def _warn_of_numbers(schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]) -> None:
    """Warns of numbers that are not finite, and of those that models would learn badly from."""
    for line in find_not_finite(statistics):
        logger.warning("%s", line)
    if unscaled := find_unscaled(schema, statistics):
        logger.warning(
            "numbers far from 1 reach models as they are, which learn badly from them: %s; write "
            "them scaled, as (x - mean) / deviation or log(1 + x), or leave them out of the model",
            "; ".join(f"{name} ({text})" for name, text in unscaled.items()),
        )


def _describe(survey: Survey, files: Files, surveyed: Mapping[str, Sequence[Surveyed]]) -> Manifest:
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
    plan = _write_encoders(survey, build_schema(features, merged))
    schema = plan.schema
    refuse_negative_weights(schema, merged)
    _warn_of_numbers(schema, merged)
    for name, lists in (+survey.padded_in_front).items():
        logger.warning(
            "feature %s: %s lists begin with padding, and `max_len` keeps the first values; "
            "`order: oldest_first` turns lists round that are padded in front",
            name, f"{lists:,}",
        )  # fmt: skip
    keys = {**dict(config.keys), **{r: config.find_key(r) for r in ("label", "weight")}}
    return Manifest(
        dataset_name=config.name,
        dataset_version="",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        record_type=features.record_type,
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
        counts=RowCounts(
            {"files": events},
            {"files": {}},
            events,
            rows,
            {},
            labelled=count_labelled(merged, schema),
        ),
        code_version=read_code_version(),
        statistics_file=statistics_file,
        slots=() if config.writes_anew else features.slots,
        train_counts=write_counts(survey.staging, counts),
        feature_lists=features.feature_lists if features.record_type == SEQUENCE_RECORDS else None,
    )


def _complete(manifest: Manifest, version_id: str, parent: str | None, run: RunInfo) -> Manifest:
    return replace(manifest, dataset_version=version_id, parent=parent, run=run)


def _find_compression(
    surveyed: Mapping[str, Sequence[Surveyed]],
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


def _means(statistics: Mapping[str, Mapping[str, Any]], label: str | None) -> dict[str, float]:
    if label is None:
        return {}
    found = {split: by_feature[label].get("mean") for split, by_feature in statistics.items()}
    return {split: float(mean) for split, mean in found.items() if mean is not None}


def _is_binary(feature: Mapping[str, Any]) -> bool:
    bounds = {feature.get("min"), feature.get("max")}
    return bounds <= {0, 1} and feature["distinct"]["count"] <= 2


def _write_encoders(survey: Survey, schema: FeatureSchema) -> EncoderPlan:
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
