"""The encoders of a version: fitted on its train split, or taken over from its parent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.dataset import DatasetPaths
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError
from conf.etl import BuildConfig, NormalizeConfig, QuantileConfig, SparseIndicesConfig
from conf.manifest import FileInfo
from etl.behaviour.columns import history_names
from etl.behaviour.histories import add_histories
from etl.encoders.fit import fit_encoders as fit_all
from etl.encoders.fit import live_tokens
from etl.encoders.operation_fit import TrainSplit
from etl.encoders.vocabulary import load_vocabulary
from etl.features import FeaturePlan
from etl.file_info import describe_file
from etl.identity import event_columns
from etl.partition_reuse import link_file
from etl.runs import Parent
from etl.split import SPLIT_COLUMN, TRAIN

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class FittedEncoders:
    """Encoders in the version's folder.

    Attributes:
        plan: What they do.
        files: Their files.
        item_tokens: The items' vocabulary, one column `token`; None where records have no item.
    """

    plan: EncoderPlan
    files: tuple[FileInfo, ...]
    item_tokens: pa.Table | None


def find_previous_encoders(
    paths: DatasetPaths, features: FeaturePlan, parent: Parent | None
) -> Path | None:
    """Returns the encoders of the current version, where a vocabulary is to grow out of them.

    Raises:
        InputDataError: The version is damaged: its tokens would get other ids.
    """
    if parent is None or not features.has_growing_vocabulary:
        return None
    if parent.manifest is None:
        raise InputDataError(
            "the current version, whose vocabularies are to grow, is damaged",
            received=paths.version(parent.version_id),
            fix="roll back to an earlier version by `sluice versions rollback`",
        )
    return paths.version(parent.version_id) / ENCODERS_DIR


def fit_encoders(
    events: DataFrame,
    config: BuildConfig,
    features: FeaturePlan,
    staging: Path,
    previous: Path | None = None,
) -> FittedEncoders:
    """Fits every encoder on the train split, and writes the encoders' files.

    Args:
        events: Kept events.
        config: The build's config.
        features: The features.
        staging: Directory of the version.
        previous: Encoders that incremental vocabularies grow out of, or None.

    Raises:
        InputDataError: No item is in the vocabulary, or a column has nothing to fit.
    """
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    if _fits_histories(features, config):
        events = add_histories(events, config)
    train = TrainSplit(
        rows=events.where(events[SPLIT_COLUMN] == TRAIN),
        key=tuple(event_columns(config)),
        time_column_ms="__event_ts_ms" if config.events.time else None,
        label=config.label.name if config.label else None,
    )
    fitted = fit_all(train, features, directory, previous)
    return _read_fitted(fitted.plan, features, staging)


def _fits_histories(features: FeaturePlan, config: BuildConfig) -> bool:
    """Whether numbers are fitted on lists that histories make, such as the gaps to their items."""
    made = set(history_names(config))
    return any(
        isinstance(feature.encoding, NormalizeConfig | QuantileConfig | SparseIndicesConfig)
        and made.intersection(feature.columns)
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
    text = (directory / ENCODERS_FILE).read_text(encoding="utf-8")
    return _read_fitted(EncoderPlan.from_json(json.loads(text)), features, staging)


def _read_fitted(plan: EncoderPlan, features: FeaturePlan, staging: Path) -> FittedEncoders:
    directory = staging / ENCODERS_DIR
    item = next((f for f in features.features if f.name == features.keys.item), None)
    name = None if item is None else item.vocabulary
    tokens = live_tokens(load_vocabulary(directory, plan.vocabulary(name))) if name else None
    if item is not None and (tokens is None or not tokens.num_rows):
        raise InputDataError(
            "the vocabulary of the items is empty: nothing could be ranked",
            received=f"feature {item.name!r}: {item.encoding}",
            fix="lower `min_count`, or check the log",
        )
    files = tuple(
        describe_file(staging, path) for path in sorted(directory.iterdir()) if path.is_file()
    )
    return FittedEncoders(plan, files, tokens)
