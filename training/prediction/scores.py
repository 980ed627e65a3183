"""Scores of rows by a ranking model, of a file or a split: one per task, in the rows' order.

A row of the output has its number (`row`, from 1) or the id of the file, and a float32 per task;
how it is written stands in `row_files.py`. The score of a binary task is the probability of label
1, that of another one the label's value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.atomic_output import atomic_file
from conf.errors import ConfigError, InputDataError
from training.checkpoint.restore import TrainedModel
from training.evaluation.protocols import require_rows
from training.evaluation.task_metrics import compile_scores
from training.export.serving_encoders import (
    ServingEncoders,
    build_serving_encoders,
    find_event_time,
)
from training.input.batches import Features, build_eval_dataset, read_batches
from training.input.vocabularies import read_plan
from training.models.ranking import RankingModel
from training.prediction.raw_rows import RawFile, RawReader
from training.prediction.row_files import RowWriter, check_format, to_arrow

ROW_COLUMN = "row"


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
        trained: A ranking model.
        target: File to write; its suffix says how.
        split: Split to score.
        file: Rows to score instead.

    Returns:
        Number of rows.

    Raises:
        ConfigError: The format of a file is not known by its name, or the id is named as a task.
        InputDataError: A row is damaged or refused, or its score is no number.
    """
    model = trained.model
    if not isinstance(model, RankingModel):
        raise TypeError(f"a {type(model).__name__} does not score rows")
    tasks = [task.name for task in model.tasks]
    name = ROW_COLUMN if file is None or file.id_column is None else file.id_column
    check_output(target, name, tasks)
    rows = read_split_rows(trained, split) if file is None else read_file_rows(trained, file)
    score = compile_scores(model, model.predict)
    total = 0
    with atomic_file(target) as unfinished, RowWriter(unfinished, target.name) as writer:
        for batch in rows:
            found = {n: np.asarray(v, np.float32) for n, v in score(batch.features).items()}
            check_numbers(found, batch.first)
            writer.write({name: batch.ids, **{task: to_arrow(found[task]) for task in tasks}})
            total += len(batch.ids)
    return total


def check_output(target: Path, id_column: str, tasks: list[str]) -> None:
    """Refuses a file of scores that cannot be written.

    Raises:
        ConfigError: Its format is not known by its name, or the id is named as a task.
    """
    check_format(target)
    if id_column in tasks:
        raise ConfigError(
            "the id has the name of a task, whose score is a column too",
            received=id_column,
            allowed=f"any name but {', '.join(tasks)}",
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
    event_time = find_event_time(trained.manifest)
    return build_serving_encoders(trained.version_dir, plan, names, event_time)


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
