"""TFRecord files of one's own as a dataset version: mapped, surveyed, published by a manifest.

Files → mapping (what each feature is in the records) → survey (one pass: decode, check, count, link
or write) → schema → manifest. No record is written anew, unless ids move or lists turn. Needs no
Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import DatasetPaths
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE
from conf.errors import ConfigError, InputDataError, read_code_version
from conf.etl.imported import ImportConfig
from conf.manifest import (
    SEQUENCE_RECORDS,
    InputFile,
    Manifest,
    RowCounts,
    RunInfo,
    SourceSnapshot,
    SplitInfo,
)
from conf.publication.entries import stage_entry
from conf.schema import FeatureSchema, fingerprint
from etl.imported.mapping import RecordMapping, describe_input, find_files, map_records
from etl.imported.schema import build_schema, write_encoders
from etl.imported.survey import Survey, SurveyedFile
from etl.quality.lint import find_not_finite, find_unscaled, refuse_negative_weights
from etl.quality.statistics import count_labelled, merge_statistics, summarize_statistics
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
Statistics = Mapping[str, Mapping[str, Any]]  # By split and feature.


@dataclass(frozen=True)
class ImportResult:
    """A published version: its directory, of one in a store the copy.

    `is_new` is false where the current version holds these files already.
    """

    version: Path
    manifest: Manifest
    is_new: bool = True


def import_dataset(config: ImportConfig) -> ImportResult:
    """Publishes TFRecord files as a dataset version, unless the current one holds the same."""
    files = find_files(config)
    mapping = map_records(config, files)
    run = RunInfo(_fingerprint(config, files))
    with hold_dataset(find_dataset(config.output.root, config.name)) as paths:
        sweep_leftovers(paths)
        parent = read_current(paths)
        current = _read_current(paths, parent)
        if current is not None and current.run == run:
            return ImportResult(paths.version(current.dataset_version), current, is_new=False)
        version_id = new_version_id(run.fingerprint)
        with stage_entry(paths.versions, version_id) as staging:
            survey = Survey(mapping, staging)
            shards = [
                survey.read(number, file)
                for _, listed in groupby(files, lambda file: file.source)
                for number, file in enumerate(listed)
            ]
            _check_unchanged(files)
            fields = _describe(mapping, files, survey, shards, staging)
            manifest = Manifest(dataset_version=version_id, parent=parent, run=run, **fields)
            version = publish_version(paths, staging, manifest)
    return ImportResult(version, manifest)


def _fingerprint(config: ImportConfig, files: Sequence[InputFile]) -> str:
    resolved = {k: v for k, v in config.resolved().items() if k not in ("data_dir", "output")}
    inputs = [(file.source, file.path, file.bytes, file.state) for file in files]
    how = config.output.files
    return fingerprint(
        {"config": resolved, "files": how, "inputs": inputs, "code": read_code_version()}
    )


def _read_current(paths: DatasetPaths, current: str | None) -> Manifest | None:
    """The current version, None if it is damaged; what `sluice build` goes on from is refused."""
    try:
        manifest = None if current is None else read_published(paths, current)
    except InputDataError:
        return None
    if manifest is not None and "sources" in manifest.source.config:
        raise ConfigError(
            f"dataset {paths.name!r} is made by `sluice build`",
            fix="import under another name, or into another output.root",
        )
    return manifest


def _check_unchanged(files: Sequence[InputFile]) -> None:
    for file in files:
        if describe_input(file.source, Path(file.path)) != file:
            raise InputDataError(
                "a file was written while it was imported",
                received=file.path,
                fix="wait until the program that writes it has ended, and import again",
            )


def _describe(
    mapping: RecordMapping,
    files: Sequence[InputFile],
    survey: Survey,
    shards: Sequence[SurveyedFile],
    staging: Path,
) -> dict[str, Any]:
    """The manifest, but for what names the version; writes what it lists beside the shards."""
    config, keys = mapping.config, mapping.keys
    splits = [
        SplitInfo(name, tuple(shard.info for shard in shards if shard.split == name))
        for name in config.splits
    ]
    rows: dict[str, int] = {split.name: split.rows for split in splits}
    if empty := [name for name, count in rows.items() if not count]:
        raise InputDataError(
            f"the files of split {empty[0]} hold no record",
            fix=f"correct splits.{empty[0]}, or leave the split out",
        )
    merged: dict[str, dict[str, Any]] = {
        name: merge_statistics([shard.statistics for shard in shards if shard.split == name])
        for name in config.splits
    }
    counts = survey.keys.result()
    check_rows(counts, rows["train"])
    plan = write_encoders(staging, mapping, build_schema(mapping, merged), survey.tokens)
    refuse_negative_weights(plan.schema, merged)
    _warn(plan.schema, merged, +survey.padded_in_front)
    events = sum(count for name, count in rows.items() if name not in ("catalog", "users"))
    labelled = count_labelled(merged, plan.schema)
    encoder_files = (ENCODERS_FILE, *(vocabulary.file for vocabulary in plan.vocabularies))
    rates = {spec.name: _means(merged, spec.name) for spec in plan.schema.by_role("label")}
    return {
        "dataset_name": config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "record_type": mapping.record_type,
        "compression": _find_compression(shards),
        "splits": tuple(splits),
        "schema": plan.schema,
        "keys": keys,
        "encoder_files": tuple(
            describe_file(staging, staging / ENCODERS_DIR / file) for file in encoder_files
        ),
        "encoders_fingerprint": plan.fingerprint,
        "statistics": {split: summarize_statistics(found) for split, found in merged.items()},
        "statistics_file": write_statistics(staging, merged),
        "label_rate": {} if keys.label is None else _means(merged, keys.label),
        "label_rates": {
            name: rate
            for name, rate in rates.items()
            if name != keys.label and _is_binary(merged["train"][name])
        },
        "source": SourceSnapshot(
            inputs=tuple(files),
            event_ts_ms_range=None,
            config=config.resolved(),
            config_sha256=fingerprint(config.resolved()),
        ),
        "counts": RowCounts({"files": events}, {"files": {}}, events, rows, {}, labelled=labelled),
        "code_version": read_code_version(),
        "slots": () if config.writes_anew else mapping.slots,
        "train_counts": write_counts(staging, counts),
        "feature_lists": (
            mapping.feature_lists if mapping.record_type == SEQUENCE_RECORDS else None
        ),
    }


def _warn(schema: FeatureSchema, statistics: Statistics, padded: Mapping[str, int]) -> None:
    """Warns of what models would learn badly from."""
    for line in find_not_finite(statistics):
        logger.warning("%s", line)
    if unscaled := find_unscaled(schema, statistics):
        logger.warning(
            "numbers far from 1 reach models as they are, which learn badly from them: %s; write "
            "them scaled, as (x - mean) / deviation or log(1 + x), or leave them out of the model",
            "; ".join(f"{name} ({text})" for name, text in unscaled.items()),
        )
    for name, lists in padded.items():
        logger.warning(
            "feature %s: %s lists begin with padding, and `max_len` keeps the first values; "
            "`order: oldest_first` turns lists round that are padded in front",
            name, f"{lists:,}",
        )  # fmt: skip


def _find_compression(shards: Sequence[SurveyedFile]) -> str | None:
    found = {shard.compression: shard.info.path for shard in shards if shard.info.rows}
    if len(found) > 1:
        raise InputDataError(
            "the files are compressed in different ways",
            received=", ".join(f"{kind or 'plain'}: {path}" for kind, path in found.items()),
            fix="convert some of them by `sluice convert`, or import two datasets",
        )
    [compression] = found
    return compression and compression.lower()


def _means(statistics: Statistics, label: str) -> dict[str, float]:
    found = {split: by_feature[label].get("mean") for split, by_feature in statistics.items()}
    return {split: float(mean) for split, mean in found.items() if mean is not None}


def _is_binary(feature: Mapping[str, Any]) -> bool:
    bounds = {feature.get("min"), feature.get("max")}
    return bounds <= {0, 1} and feature["distinct"]["count"] <= 2
