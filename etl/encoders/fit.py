"""Fitting every encoder of a build on its train split, and writing what was fitted."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from conf.dataset import write_text_atomic
from conf.encoders import ENCODERS_FILE, EncoderPlan, VocabularySpec
from conf.schema import FIRST_TOKEN_ID
from etl.encoders.growth import Growth, VocabularyDiff, diff_vocabularies
from etl.encoders.operation_fit import TrainSplit, fit_operations
from etl.encoders.pipeline import read_plan
from etl.encoders.plan import build_plan
from etl.encoders.token_counts import TokenLimits, VocabularyRequest
from etl.encoders.vocabulary import RETIRED_COLUMN, load_vocabulary, write_vocabulary
from etl.encoders.vocabulary_fit import fit_vocabularies
from etl.features import FeaturePlan
from etl.vocabulary_plans import VocabularyPlan

logger = logging.getLogger("sluice.encoders")

CHANGES_FILE = "vocabulary_changes.json"


@dataclass(frozen=True)
class FittedEncoders:
    """What was fitted and written.

    Attributes:
        plan: The encoder plan.
        tokens: Tokens that have an id and are not retired, by vocabulary: one column, `token`.
        changes: What changed in each growing vocabulary.
    """

    plan: EncoderPlan
    tokens: Mapping[str, pa.Table]
    changes: tuple[VocabularyDiff, ...]


@dataclass(frozen=True)
class PreviousVocabulary:
    """A vocabulary of the previous version."""

    spec: VocabularySpec
    table: pa.Table


def read_previous(directory: Path | None) -> dict[str, PreviousVocabulary]:
    """Reads the vocabularies of an earlier version, by name.

    Args:
        directory: The version's `encoders`; None where there is no earlier version.

    Raises:
        InputDataError: The encoders are damaged.
    """
    if directory is None:
        return {}
    return {
        spec.name: PreviousVocabulary(spec, load_vocabulary(directory, spec))
        for spec in read_plan(directory).vocabularies
    }


def fit_encoders(
    train: TrainSplit, plan: FeaturePlan, directory: Path, previous: Path | None = None
) -> FittedEncoders:
    """Fits all encoders, and writes them.

    Args:
        train: The train split.
        plan: The features.
        directory: Where the files go; it exists and is empty.
        previous: `encoders` of the version that incremental vocabularies grow out of, or None.

    Raises:
        InputDataError: The previous encoders are damaged, or a column has nothing to fit.
        ConfigError: A vocabulary cannot grow out of the previous one.
    """
    known = read_previous(previous)
    olds = [known.get(v.name) if v.incremental else None for v in plan.vocabularies]
    requests = [_request(train, v, old) for v, old in zip(plan.vocabularies, olds, strict=True)]
    fitted = fit_vocabularies(train.rows, requests)
    specs, tables, changes = [], {}, []
    for vocabulary, old, table in zip(plan.vocabularies, olds, fitted, strict=True):
        path = directory / f"{vocabulary.name}.parquet"
        spec = write_vocabulary(
            table, path, vocabulary.oov_buckets, None if old is None else old.spec
        )
        logger.info("vocabulary %s: %s tokens", vocabulary.name, f"{table.num_rows:,}")
        specs.append(spec)
        tables[vocabulary.name] = table
        if vocabulary.incremental:
            changes.append(_diff(spec, old, table))
    operations, statistics = fit_operations(train, plan, tables, directory)
    encoder_plan = build_plan(plan, specs, operations, statistics)
    write_text_atomic(directory / ENCODERS_FILE, encoder_plan.dumps())
    if changes:
        text = json.dumps([change.to_json() for change in changes], indent=1, ensure_ascii=False)
        write_text_atomic(directory / CHANGES_FILE, text + "\n")
    tokens = {name: live_tokens(table) for name, table in tables.items()}
    return FittedEncoders(encoder_plan, tokens, tuple(changes))


def live_tokens(table: pa.Table) -> pa.Table:
    """Returns the tokens of a vocabulary that are not retired: one column, `token`."""
    if RETIRED_COLUMN in table.schema.names:
        table = table.filter(pc.invert(table[RETIRED_COLUMN]))
    return table.select(["token"])


def _request(
    train: TrainSplit, plan: VocabularyPlan, old: PreviousVocabulary | None
) -> VocabularyRequest:
    growth = None
    if plan.incremental:
        growth = Growth(
            previous=None if old is None else old.table,
            time_column_ms=train.time_column_ms,
            expire_after_days=plan.expire_after_days,
        )
    return VocabularyRequest(
        plan.columns,
        TokenLimits(plan.min_count, plan.max_size, plan.top_per_group),
        first_id=FIRST_TOKEN_ID + (plan.oov_buckets or 0),
        growth=growth,
    )


def _diff(spec: VocabularySpec, old: PreviousVocabulary | None, table: pa.Table) -> VocabularyDiff:
    previous = None if old is None else old.table
    diff = diff_vocabularies(spec.name, previous, table, spec.version, spec.parent_crc32c)
    logger.info(
        "vocabulary %s, version %s: %s kept, %s added, %s retired, %s revived",
        *(spec.name, spec.version, diff.kept, diff.added, diff.retired, diff.revived),
    )
    return diff
