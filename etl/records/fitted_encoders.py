"""The encoders of a version: fitted on its train split, or taken over from its parent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from conf.artefacts.encoder_files import read_plan_file
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError
from conf.splits import TRAIN
from conf.storage.atomic_output import link_file, write_text_atomic
from etl.encoders.fit import EarlierEncoders, TrainSplit, build_plan, fit_operations
from etl.encoders.vocabulary import OddTokens, find_odd_tokens, live_tokens, load_vocabulary
from etl.encoders.vocabulary_fit import fit_vocabulary_files
from etl.events.columns import EVENT_TS_COLUMN, SPLIT_COLUMN, fold_columns
from etl.events.histories import add_histories
from etl.events.most_frequent import fit_most_frequent
from etl.events.splits import is_not_after
from etl.features.plan import FeaturePlan, history_names
from etl.tfrecord.codec.crc32c import describe_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conf.dates import DateRange
    from conf.etl.build import BuildConfig
    from conf.etl.encodings import FeatureConfig
    from conf.manifest import FileInfo

KEPT_FILE = "kept_numbers.json"
"""Beside the encoders: the version that kept numbers were fitted in, by feature."""


@dataclass(frozen=True)
class FittedEncoders:
    """Encoders in the version's folder.

    Attributes:
        plan: What they do.
        files: Their files.
        item_tokens: The items' vocabulary, one column `token`; None where records have no item.
        tokens: Number of tokens by vocabulary, retired ones left out.
        odd: By vocabulary, those of its new tokens that are likely a header or hold quotes.
    """

    plan: EncoderPlan
    files: tuple[FileInfo, ...]
    item_tokens: pa.Table | None
    tokens: Mapping[str, int]
    odd: Mapping[str, OddTokens] = field(default_factory=dict)


def _write_kept(earlier: EarlierEncoders, directory: Path) -> None:
    """Writes the version that each kept number was fitted in."""
    file = earlier.directory / KEPT_FILE
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    origins = {name: known.get(name, earlier.version) for name in sorted(earlier.kept)}
    if origins:
        text = json.dumps(origins, indent=1, ensure_ascii=False)
        write_text_atomic(directory / KEPT_FILE, text + "\n")


def fit_encoders(
    events: DataFrame,
    config: BuildConfig,
    features: FeaturePlan,
    staging: Path,
    earlier: EarlierEncoders | None = None,
    dates: DateRange | None = None,
) -> FittedEncoders:
    """Fits every encoder on the train split, and writes the encoders' files.

    Args:
        events: Kept events.
        config: The build's config.
        features: The features.
        staging: Directory of the version.
        earlier: Encoders that incremental vocabularies append to, and whose numbers may be kept;
            None: there are none.
        dates: Days whose events become samples, which numbers and statistics are fitted on; None:
            all. Vocabularies hold the tokens of all events.

    Raises:
        InputDataError: No item is in the vocabulary, or a column has nothing to fit.
    """
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    if _fits_histories(features, config):
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
    vocabularies = fit_vocabulary_files(train, features, directory, previous)
    tables = {name: table for name, (_, table) in vocabularies.items()}
    operations, statistics = fit_operations(train, features, tables, directory, earlier)
    specs = [spec for spec, _ in vocabularies.values()]
    plan = build_plan(features, specs, operations, statistics)
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    if earlier is not None:
        _write_kept(earlier, directory)
    fitted = _check_fitted(plan, features, staging, tables)
    odd = {v.name: find_odd_tokens(tables[v.name], v.columns) for v in features.vocabularies}
    return replace(fitted, odd=odd)


def _fits_histories(features: FeaturePlan, config: BuildConfig) -> bool:
    """Whether numbers are fitted on lists that histories make, such as the gaps to their items."""
    made = set(history_names(config))
    return any(
        feature.encoding.fits_numbers and made.intersection(feature.columns)
        for feature in features.features
    )


def take_over_encoders(parent: Path, features: FeaturePlan, staging: Path) -> FittedEncoders:
    """Links the encoders of another version: its shards stay valid beside new ones.

    Args:
        parent: Directory of that version.
        features: The features.
        staging: Directory of the version that is built.
    """
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    for file in sorted((parent / ENCODERS_DIR).iterdir()):
        link_file(file, directory / file.name)
    plan = read_plan_file(directory)
    name = _item_vocabulary(features)
    # Only the items are needed, and of those that retire tokens how many are left.
    needed = [spec for spec in plan.vocabularies if spec.incremental or spec.name == name]
    tables = {spec.name: load_vocabulary(directory, spec) for spec in needed}
    return _check_fitted(plan, features, staging, tables)


def _item_feature(features: FeaturePlan) -> FeatureConfig | None:
    return next((f for f in features.features if f.name == features.keys.item), None)


def _item_vocabulary(features: FeaturePlan) -> str | None:
    item = _item_feature(features)
    return None if item is None else item.vocabulary


def _check_fitted(
    plan: EncoderPlan, features: FeaturePlan, staging: Path, tables: Mapping[str, pa.Table]
) -> FittedEncoders:
    item, items = _item_feature(features), tables.get(_item_vocabulary(features) or "")
    tokens = None if items is None else live_tokens(items)
    if item is not None and (tokens is None or not tokens.num_rows):
        raise InputDataError(
            "the vocabulary of the items is empty: nothing could be ranked",
            received=f"feature {item.name!r}: {item.encoding}",
            fix="lower `min_count`, or check the log",
        )
    files = tuple(
        describe_file(staging, path)
        for path in sorted((staging / ENCODERS_DIR).iterdir())
        if path.is_file()
    )
    return FittedEncoders(plan, files, tokens, _count_tokens(plan, tables))


def _count_tokens(plan: EncoderPlan, tables: Mapping[str, pa.Table]) -> dict[str, int]:
    return {
        spec.name: live_tokens(tables[spec.name]).num_rows
        if spec.incremental
        else spec.size - spec.first_token_id
        for spec in plan.vocabularies
    }
