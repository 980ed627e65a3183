"""TFRecord files of one's own as a dataset version: mapped, surveyed, published by a manifest.

Files → mapping (what each feature is in the records) → survey (one pass: decode, check, count, link
or write) → schema → manifest. No record is written anew, unless ids move or lists turn. Needs no
Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.artefacts.dataset import DatasetPaths
from conf.artefacts.entries import ENTRY_NAME_PATTERN
from conf.artefacts.train_counts import IdCounter
from conf.encoders import (
    ENCODERS_DIR,
    ENCODERS_FILE,
    IDENTITY,
    ColumnEncoding,
    EncoderPlan,
    VocabularySpec,
)
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
from conf.schema import FIRST_TOKEN_ID, FeatureSchema, FeatureSpec, fingerprint
from conf.splits import CATALOG, USERS
from conf.storage.atomic_output import write_text_atomic
from etl.encoders.vocabulary import write_vocabulary
from etl.imported.mapping import (
    MappedFeature,
    RecordMapping,
    build_schema,
    describe_input,
    find_files,
    map_records,
)
from etl.imported.survey import Survey
from etl.quality.lint import refuse_negative_weights
from etl.quality.statistics import count_labelled, merge_statistics, summarize_statistics
from etl.quality.version_view import write_statistics
from etl.records.train_counts import write_counts
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
            for file in files:
                survey.read(file)
            _check_unchanged(files)
            _warn_of_padding(+survey.padded)
            manifest = Manifest(
                dataset_version=version_id,
                parent=parent,
                run=run,
                **_describe_records(mapping, survey, files),
                **_describe_values(mapping, survey, staging),
            )
            version = publish_version(paths, staging, manifest)
    return ImportResult(version, manifest)


def _fingerprint(config: ImportConfig, files: Sequence[InputFile]) -> str:
    what = config.model_dump(mode="json", exclude={"data_dir": True, "output": {"root"}})
    inputs = [(file.source, file.path, file.bytes, file.state) for file in files]
    return fingerprint({"config": what, "inputs": inputs, "code": read_code_version()})


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
                f"{file.path} was written while it was imported",
                fix="wait until the program that writes it has ended, and import again",
            )


def _warn_of_padding(padded: Mapping[str, int]) -> None:
    for name, lists in padded.items():
        logger.warning(
            "feature %s: %s lists begin with padding, and `max_len` keeps the first values; turn "
            "lists that are padded in front by `order: oldest_first`",
            name, f"{lists:,}",
        )  # fmt: skip


def _describe_records(
    mapping: RecordMapping, survey: Survey, files: Sequence[InputFile]
) -> dict[str, Any]:
    """What the manifest says of the files and of how records lie in them."""
    config, resolved = mapping.config, mapping.config.resolved()
    return {
        "dataset_name": config.name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_version": read_code_version(),
        "source": SourceSnapshot(tuple(files), None, resolved, fingerprint(resolved)),
        "record_type": mapping.record_type,
        "compression": _find_compression(survey),
        "splits": tuple(
            SplitInfo(split, tuple(shard.info for shard in shards))
            for split, shards in survey.shards.items()
        ),
        "keys": mapping.keys,
        "slots": () if config.writes_anew else mapping.slots,
        "feature_lists": mapping.feature_lists if mapping.record_type == SEQUENCE_RECORDS else None,
    }


def _find_compression(survey: Survey) -> str | None:
    shards = (shard for shards in survey.shards.values() for shard in shards)
    found = {shard.compression: shard.info.path for shard in shards if shard.info.rows}
    if len(found) > 1:
        raise InputDataError(
            "the files are compressed in different ways",
            received=", ".join(f"{kind or 'plain'}: {path}" for kind, path in found.items()),
            fix="convert some of them by `sluice convert`, or import two datasets",
        )
    return next((kind.lower() for kind in found if kind), None)


def _describe_values(mapping: RecordMapping, survey: Survey, staging: Path) -> dict[str, Any]:
    """What the manifest says of values; writes what it lists beside the shards."""
    rows = _count_rows(survey)
    statistics: dict[str, dict[str, Any]] = {
        split: merge_statistics([shard.statistics for shard in shards])
        for split, shards in survey.shards.items()
    }
    plan = _write_encoders(staging, mapping, build_schema(mapping, statistics), survey.tokens)
    refuse_negative_weights(plan.schema, statistics)
    events = sum(count for split, count in rows.items() if split not in (CATALOG, USERS))
    labelled = count_labelled(statistics, plan.schema)
    means = _find_means(plan.schema, statistics)
    files = (ENCODERS_FILE, *(vocabulary.file for vocabulary in plan.vocabularies))
    return {
        "schema": plan.schema,
        "encoder_files": tuple(
            describe_file(staging, staging / ENCODERS_DIR / file) for file in files
        ),
        "encoders_fingerprint": plan.fingerprint,
        "statistics": {split: summarize_statistics(found) for split, found in statistics.items()},
        "statistics_file": write_statistics(staging, statistics),
        "counts": RowCounts({"files": events}, {"files": {}}, events, rows, {}, labelled=labelled),
        "train_counts": write_counts(staging, survey.keys.result()),
        "label_rate": means.get(mapping.keys.label or "", {}),
        "label_rates": {
            label: of_split
            for label, of_split in means.items()
            if label != mapping.keys.label and _is_binary(statistics["train"][label])
        },
    }


def _count_rows(survey: Survey) -> dict[str, int]:
    rows = {split: sum(s.info.rows for s in shards) for split, shards in survey.shards.items()}
    for split, count in rows.items():
        if not count:
            raise InputDataError(
                f"the files of split {split} hold no record",
                fix=f"correct splits.{split}, or leave the split out",
            )
    return rows


def _find_means(schema: FeatureSchema, statistics: Statistics) -> dict[str, dict[str, float]]:
    """By label and split."""
    return {
        spec.name: {
            split: float(mean)
            for split, found in statistics.items()
            if (mean := found[spec.name].get("mean")) is not None
        }
        for spec in schema.by_role("label")
    }


def _is_binary(feature: Mapping[str, Any]) -> bool:
    bounds = {feature.get("min"), feature.get("max")}
    return bounds <= {0, 1} and feature["distinct"]["count"] <= 2


def _write_encoders(
    staging: Path, mapping: RecordMapping, schema: FeatureSchema, tokens: Mapping[str, IdCounter]
) -> EncoderPlan:
    """Writes how features come from the files' values: as they are, or by vocabularies."""
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    written: dict[str, VocabularySpec] = {}
    specs: list[FeatureSpec] = []
    for feature, spec in zip(mapping.features, schema.features, strict=True):
        table = spec.table
        if feature.offset and table not in written:
            is_plain = ENTRY_NAME_PATTERN.fullmatch(table) and table != IDENTITY
            path = directory / f"{table if is_plain else f'ids_{len(written)}'}.parquet"
            vocabulary = _build_vocabulary(feature, spec.vocabulary_size or 0, tokens[table])
            written[table] = replace(write_vocabulary(vocabulary, path), pad_token=feature.pad)
        specs += [replace(spec, encoding=written[table].name) if feature.offset else spec]
    plan = EncoderPlan(
        FeatureSchema(tuple(specs)),
        tuple(ColumnEncoding(spec.name, spec.name, spec.dtype, spec.encoding) for spec in specs),
        vocabularies=tuple(written.values()),
    )
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    return plan


def _build_vocabulary(feature: MappedFeature, size: int, held: IdCounter) -> pa.Table:
    ids, counts = np.arange(size), np.zeros(size, np.int64)
    found = held.result()
    counts[found.ids] = found.rows
    # The tokens are the ids of the files: an exported model speaks of those.
    columns = {"token": ids - feature.offset, "id": ids, "count": counts}
    return pa.table(columns).slice(FIRST_TOKEN_ID)
