"""`sluice predict`: reads rows, calls the engine and writes what they get."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from conf.artefacts.export import ExportOptions, Give, find_exports, list_models
from conf.artefacts.run import EXPORT_DIR
from conf.errors import ConfigError
from conf.splits import TEST
from conf.storage.atomic_output import atomic_file
from training.apply.answers import Answers, Asked, Rows, Source, answer, plan_answers
from training.apply.export import Export, Items
from training.apply.ranker import Ranker
from training.apply.results import ResultWriter, check_format
from training.apply.rows import DatasetRows, choose_items, choose_split, read_file, read_users
from training.checkpoint.restore import RunReference, find_checkpoint, load_run
from training.export.saved_model import write_export
from training.export.stored_models import describe
from training.reader.training_data import TrainingData

OWN_EXPORTS = ".predict"
"""Folder of a run with the exports that predictions made, which nothing serves."""
_log = logging.getLogger("sluice.training.predict")


@dataclass(frozen=True)
class Predicted:
    """What was written: of which rows, how many, and without how many users that have no name."""

    rows: int
    left_out: int
    answers: Answers
    source: Source


def find_export(run_dir: Path, checkpoint: Literal["best", "last"]) -> Path:
    """Returns the export of a run's checkpoint; where there is none it is made, for nobody else."""
    point, run = find_checkpoint(run_dir, checkpoint), describe(run_dir.resolve())
    for base in (run_dir / EXPORT_DIR, run_dir / OWN_EXPORTS):
        for model in list_models(base):
            found = find_exports(model, run, (point.epoch, point.batch))
            if own := [version.number for version in found if not version.is_withdrawn]:
                return model / str(own[-1])
    return write_export(load_run(run_dir, checkpoint), ExportOptions(run_dir / OWN_EXPORTS, keep=2))


def read_data(run_dir: Path) -> TrainingData:
    """Returns the dataset version that a run was trained on."""
    reference = RunReference.read(run_dir)
    return TrainingData(reference.version_dir, reference.read_manifest())


def predict_rows(
    export: Export, source: Source, asked: Asked, target: Path, data: TrainingData | None = None
) -> Predicted:
    """Writes what rows get; an earlier file is replaced when the new one is complete.

    Without the dataset of the model's run, rows are those of the export or of a file.
    """
    check_format(target)
    answers = plan_answers(export, asked, source)
    items = choose_items(export, asked.candidates, data) if answers.give is Give.LISTS else None
    source = resolve_source(export, answers, source, data)
    ranker = Ranker(export, answers.task, items)
    total, written = write_answers(
        ranker, answers, read_rows(export, answers, source, items, data), target
    )
    if left_out := total - written:
        _log.warning("%s of %s lists are of users outside the vocabulary and not written",
                     f"{left_out:,}", f"{total:,}")  # fmt: skip
    return Predicted(written, left_out, answers, source)


def resolve_source(
    export: Export, answers: Answers, source: Source, data: TrainingData | None
) -> Source:
    """Returns which rows are meant where nothing says it."""
    named = source.split or source.as_of or source.users
    if data is None and named:
        raise ConfigError("an export knows its users as they are now, and no split",
                          received=named, fix="name the run by --run")  # fmt: skip
    if source.file is not None or data is None or source.split or source.as_of:
        return source
    if source.users is not None:
        return replace(source, as_of=TEST)
    is_list = answers.give is Give.LISTS
    return replace(source, split=choose_split(export, data.manifest) if is_list else TEST)


def read_rows(
    export: Export,
    answers: Answers,
    source: Source,
    items: Items | None,
    data: TrainingData | None,
) -> Iterator[Rows]:
    """Yields the rows of a source that is resolved, with what each has met where that counts."""
    if source.file is not None:
        return read_file(export, answers, source.file, items)
    if data is None:
        return read_users(export, answers, items)
    return DatasetRows(export, data, answers, items).read(source)


def write_answers(
    ranker: Ranker, answers: Answers, rows: Iterable[Rows], target: Path
) -> tuple[int, int]:
    """Writes a file of what rows get; returns how many were read and written."""
    total = written = 0
    with atomic_file(target) as unfinished, ResultWriter(unfinished, target.name) as writer:
        for batch in rows:
            columns = answer(ranker, answers, batch)
            writer.write(columns)
            total, written = total + len(batch.names), written + len(columns[batch.key])
    return total, written
