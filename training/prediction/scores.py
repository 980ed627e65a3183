"""Scores of rows, of a file or a split, in the rows' order.

A row of the output has its number (`row`, from 1) or the id of the file, and a float32 per score;
`result_files.py` writes it. A ranking model gives one per task: the probability of
label 1, or the label's value. A retrieval model gives `score`, the dot product of the row's user
and its item, which orders its lists too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.storage.atomic_output import atomic_file
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import read_plan
from training.evaluation.protocols import require_rows
from training.evaluation.scorers import score_pairs
from training.evaluation.task_metrics import compile_scores
from training.export.serving_encoders import (
    ServingEncoders,
    build_serving_encoders,
)
from training.export.source_facts import read_source_facts
from training.input.batches import Features, build_eval_dataset, read_batches
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel
from training.prediction.result_files import ResultWriter, check_format, to_arrow
from training.raw_inputs.files import RawFile, RawReader

ROW_COLUMN, SCORE_COLUMN = "row", "score"


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score.

    Attributes:
        first: Number of the first one, from 1.
        ids: What names them in the output.
        features: Their encoded features.
    """

    first: int
    ids: pa.Array
    features: Features


def write_scores(
    trained: TrainedModel, target: Path, split: str, file: RawFile | None = None
) -> int:
    """Scores rows; an earlier file is replaced when the new one is complete.

    Args:
        trained: The model.
        target: File to write; its suffix says how.
        split: Split of events to score.
        file: Rows to score instead; of a ranking model alone.

    Returns:
        Number of rows.

    Raises:
        ConfigError: The format of a file is not known by its name, or the id is named as a task.
        InputDataError: A row is damaged or refused, or its score is no number.
    """
    names, compute = _find_scores(trained.model)
    name = ROW_COLUMN if file is None or file.id_column is None else file.id_column
    check_output(target, name, names)
    rows = read_split_rows(trained, split) if file is None else read_file_rows(trained, file)
    total = 0
    with atomic_file(target) as unfinished, ResultWriter(unfinished, target.name) as writer:
        for batch in rows:
            scores = {n: np.asarray(v, np.float32) for n, v in compute(batch.features).items()}
            check_numbers(scores, batch.first)
            writer.write({name: batch.ids, **{own: to_arrow(scores[own]) for own in names}})
            total += len(batch.ids)
    return total


def _find_scores(model: Model) -> tuple[list[str], Callable[[Features], Mapping[str, Any]]]:
    """Returns the names of a model's scores, and what computes them of encoded rows."""
    if isinstance(model, RankingModel):
        return [task.name for task in model.tasks], compile_scores(model, model.predict)
    if isinstance(model, RetrievalModel):
        towers = model
        return [SCORE_COLUMN], lambda features: {SCORE_COLUMN: score_pairs(towers, features)}
    raise TypeError(f"a {type(model).__name__} does not score rows")


def check_output(target: Path, id_column: str, scores: list[str]) -> None:
    """Refuses a file of scores that cannot be written.

    Raises:
        ConfigError: Its format is not known by its name, or the id is named as a score.
    """
    check_format(target)
    if id_column in scores:
        raise ConfigError(
            "the id has the name of a score, which is a column too",
            received=id_column,
            allowed=f"any name but {', '.join(scores)}",
            fix="rename the column of the input",
        )


def read_split_rows(trained: TrainedModel, split: str) -> Iterator[ScoredRows]:
    """Yields the rows of a split with their numbers, from 1 on."""
    manifest, version_dir, names = trained.manifest, trained.version_dir, trained.model.inputs
    require_rows(manifest, split)
    batch_size = trained.config.evaluation.batch_size
    dataset = build_eval_dataset(version_dir, manifest, split, batch_size, names)
    first = 1
    for batch in read_batches(dataset, version_dir, manifest, split):
        value = batch[names[0]]
        rows = int(value.nrows() if isinstance(value, tf.RaggedTensor) else value.shape[0])
        yield ScoredRows(first, pa.array(np.arange(first, first + rows)), batch)
        first += rows


def read_file_rows(
    trained: TrainedModel, file: RawFile, names: tuple[str, ...] | None = None
) -> Iterator[ScoredRows]:
    """Yields the rows of a file, encoded as the ETL encodes them.

    Args:
        trained: The model.
        file: The file.
        names: Features to encode; None: all that the model reads.
    """
    encoders = read_encoders(trained, trained.model.inputs if names is None else names)
    encode = tf.function(lambda raw: encoders.encode(raw), reduce_retracing=True)
    for rows in RawReader(file, encoders.inputs).read(trained.config.evaluation.batch_size):
        inputs = {name: tf.constant(values) for name, values in rows.inputs.items()}
        yield ScoredRows(rows.first, rows.ids, encode(inputs))


def read_encoders(trained: TrainedModel, names: tuple[str, ...]) -> ServingEncoders:
    """Reads the encoders of some features of a run's dataset version."""
    plan = read_plan(trained.version_dir, trained.manifest)
    facts = read_source_facts(trained.manifest)
    return build_serving_encoders(trained.version_dir, plan, names, facts)


def check_numbers(scores: Mapping[str, np.ndarray], first: int) -> None:
    """Refuses scores of rows that are no numbers.

    Args:
        scores: `[rows]` or `[rows, dim]` by task.
        first: Number of the first row.

    Raises:
        InputDataError: One is not finite; names the row.
    """
    for task, values in scores.items():
        bad = ~np.isfinite(values)
        if bad.any():
            row = first + int(np.argwhere(bad)[0][0])
            raise InputDataError(
                f"the score of task {task} is no number",
                received=f"{values[bad][0]} in row {row}",
                fix="look for numbers in that row that are far from all that the model was trained "
                "on, or train again",
            )
