"""The encoders of a version: fitted on its train split, or taken over from its parent."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.dataset import write_text_atomic
from conf.encoders import ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError
from conf.manifest import FileInfo
from etl.encoders.vocabulary import fit_vocabulary, load_vocabulary, write_vocabulary
from etl.features import FeaturePlan, build_plan
from etl.file_info import describe_file
from etl.partition_reuse import link_file
from etl.split import SPLIT_COLUMN, TRAIN

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

logger = logging.getLogger("sluice.build")

ENCODERS_DIR = "encoders"


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


def fit_encoders(events: DataFrame, features: FeaturePlan, staging: Path) -> FittedEncoders:
    """Fits every vocabulary on the train split, and writes the encoders' files.

    Args:
        events: Kept events.
        features: The features.
        staging: Directory of the version.

    Raises:
        InputDataError: No item is in the vocabulary.
    """
    directory = staging / ENCODERS_DIR
    directory.mkdir()
    train = events.where(events[SPLIT_COLUMN] == TRAIN)
    specs = []
    for vocabulary in features.vocabularies:
        table = fit_vocabulary(train, vocabulary.columns, vocabulary.min_count, vocabulary.max_size)
        logger.info("vocabulary %s: %s tokens", vocabulary.name, f"{table.num_rows:,}")
        specs.append(write_vocabulary(table, directory / f"{vocabulary.name}.parquet"))
    plan = build_plan(features, specs)
    write_text_atomic(directory / ENCODERS_FILE, plan.dumps())
    return _read_fitted(plan, features, staging)


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
    name = None if item is None else features.vocabulary_name(item)
    tokens = load_vocabulary(directory, plan.vocabulary(name)).select(["token"]) if name else None
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
