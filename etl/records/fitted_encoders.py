"""The encoders of a version: fitted on its train split, or taken over from its parent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.artefacts.encoder_files import EncoderFiles, read_plan_file
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan, VocabularySpec
from conf.errors import InputDataError
from conf.etl.spark_session import read_vocabulary_bytes
from conf.splits import TRAIN
from conf.storage.atomic_output import link_file, write_text_atomic
from etl.encoders.feature_plan import FeaturePlan, history_names
from etl.encoders.fit import EarlierEncoders, TrainSplit, build_plan, fit_operations
from etl.encoders.vocabulary import OddTokens, count_live, find_odd_tokens, read_groups
from etl.encoders.vocabulary_fit import fit_vocabulary_files
from etl.events.columns import EVENT_TS_COLUMN, SPLIT_COLUMN, fold_columns
from etl.events.counted_features import fit_most_frequent
from etl.events.histories import add_histories
from etl.events.splits import is_not_after
from etl.tfrecord.codec.crc32c import crc32c, describe_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.dates import DateRange
    from conf.etl.build import BuildConfig
    from conf.manifest import FileInfo

KEPT_FILE = "kept_numbers.json"
"""Beside the encoders: the version that kept numbers were fitted in, by feature."""


@dataclass(frozen=True)
class FittedEncoders:
    """Encoders in the version's folder."""

    plan: EncoderPlan
    files: tuple[FileInfo, ...]
    items: VocabularySpec | None  # None where records have no item
    tokens: Mapping[str, int]  # how many, by vocabulary, retired ones left out
    odd: Mapping[str, OddTokens]  # new ones that are likely a header or hold quotes


def fit_encoders(
    events: DataFrame,
    config: BuildConfig,
    features: FeaturePlan,
    staging: Path,
    earlier: EarlierEncoders | None = None,
    dates: DateRange | None = None,
) -> FittedEncoders:
    """Fits every encoder on the train split, and writes the encoders' files."""
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    # Numbers may be fitted on lists that histories make, such as the gaps to their items.
    fitted = {c for f in features.features if f.encoding.fits_numbers for c in f.columns}
    if fitted.intersection(history_names(config)):
        events = add_histories(events, config)
    train = TrainSplit(
        rows=events.where(events[SPLIT_COLUMN] == TRAIN),
        key=tuple(fold_columns(config)),
        time_column_ms=EVENT_TS_COLUMN if config.events.time else None,
        label=config.first_label.name if config.first_label else None,
        data_dir=config.data_dir,
        dates=dates if config.events.time else None,
    )
    known = events if train.dates is None else events.where(is_not_after(train.dates))
    fit_most_frequent(known, config, directory)
    previous = None if earlier is None else earlier.directory
    most_bytes = read_vocabulary_bytes(config.spark)
    specs = fit_vocabulary_files(train, features, directory, most_bytes, previous)
    operations, statistics = fit_operations(train, features, specs, directory, earlier)
    plan = build_plan(features, specs, operations, statistics)
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    if earlier is not None:
        _write_kept(earlier, directory)
    odd = {
        vocabulary.name: find_odd_tokens(read_groups(directory / spec.file), vocabulary.columns)
        for vocabulary, spec in zip(features.vocabularies, specs, strict=True)
    }
    return _describe(plan, features, staging, odd)


def _write_kept(earlier: EarlierEncoders, directory: Path) -> None:
    """Writes the version that each kept number was fitted in."""
    file = earlier.directory / KEPT_FILE
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    origins = {name: known.get(name, earlier.version) for name in sorted(earlier.kept)}
    if origins:
        text = json.dumps(origins, indent=1, ensure_ascii=False)
        write_text_atomic(directory / KEPT_FILE, text + "\n")


def take_over_encoders(parent: Path, features: FeaturePlan, staging: Path) -> FittedEncoders:
    """Links the encoders of another version: its shards stay valid beside new ones."""
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    for file in sorted((parent / ENCODERS_DIR).iterdir()):
        link_file(file, directory / file.name)
    plan = read_plan_file(directory)
    for spec in plan.vocabularies:
        EncoderFiles(directory, crc32c).read_bytes(spec)
    return _describe(plan, features, staging, {})


def _describe(
    plan: EncoderPlan, features: FeaturePlan, staging: Path, odd: Mapping[str, OddTokens]
) -> FittedEncoders:
    directory, item = staging / ENCODERS_DIR, features.keys.item
    tokens = {spec.name: count_live(directory, spec) for spec in plan.vocabularies}
    name = {feature.name: feature.vocabulary for feature in features.features}.get(item or "")
    if item is not None and not tokens.get(name or ""):
        raise InputDataError(
            "the vocabulary of the items is empty: nothing could be ranked",
            received=f"feature {item!r}",
            fix="lower `min_count`, or check the log",
        )
    paths = [path for path in sorted(directory.iterdir()) if path.is_file()]
    items = None if name is None else plan.vocabulary(name)
    files = tuple(describe_file(staging, path) for path in paths)
    return FittedEncoders(plan, files, items, tokens, odd)
