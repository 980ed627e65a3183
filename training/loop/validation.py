"""Validation after each epoch and between them, the best of them, and early stopping.

The validation split is ranked, and so are the rows of train that `input.validation` holds out,
unless their labels are learned: those are scored, as rows of label 0 have no target to rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from conf.errors import ConfigError, TooFewRowsError
from conf.metrics import LOSS_METRIC, is_minimised
from conf.splits import TRAIN
from conf.training.input import FilterConfig, describe_conditions
from conf.training.models import RankingConfig
from conf.training.train import EarlyStoppingConfig, TrainConfig
from training.checkpoint.checkpoint_files import ResumeState
from training.distribution.workers import NullWriter
from training.evaluation.evaluate import FullRanking, evaluate_full
from training.evaluation.own_metrics import build_measures, build_own_metrics
from training.evaluation.protocols import (
    HeldOutRows,
    find_relevance,
    require_passing,
    warn_unmasked,
)
from training.evaluation.scored_rows import RowColumns, build_user_groups
from training.evaluation.systems import score_pairs
from training.evaluation.tasks import LabelScores, TaskScores, compile_scores, summarize_tasks
from training.input.batches import Batch, read_split
from training.loop.plan import is_scored_by_label, is_validated
from training.models.model import Model
from training.models.retrieval import require_retrieval
from training.monitoring.run_logs import EpochLog, EpochRecord, RecordLog, StepValidation
from training.reader.training_data import TrainingData

Validate = Callable[[Model], dict[str, float]]


def build_validate(
    config: TrainConfig, data: TrainingData, batches: int | None = None
) -> Validate | None:
    """Returns the function of a model to its metrics on the first batches; None: no rows."""
    if not is_validated(config, data.manifest):
        return None
    if isinstance(config.model, RankingConfig):
        return _build_task_metrics(config, data, batches)
    label = data.manifest.keys.label
    if is_scored_by_label(config) and label is not None:
        return _build_scoring(config, data, label, batches)
    return _build_ranking(config, data, batches)


def build_step_validate(config: TrainConfig, data: TrainingData) -> Validate | None:
    """Returns the validation of `fit.validation`; None: there is none between epochs."""
    asked = config.fit.validation
    if asked is None:
        return None
    validate = build_validate(config, data, asked.batches)
    if validate is None:
        raise ConfigError(
            "fit.validation has no rows to validate on",
            received=f"splits {', '.join(split.name for split in data.manifest.splits)}",
            fix="build the dataset with a validation split, set input.validation, or leave "
            "fit.validation out",
        )
    return validate


def check_validation(config: TrainConfig, data: TrainingData) -> str | None:
    """Refuses validation of no rows; returns which rows `evaluation.filter` leaves, in words."""
    held_out = config.input.validation
    if held_out is not None and not data.held_out_rows(config.input):
        raise TooFewRowsError(
            "input.validation holds out no rows",
            received=f"share {held_out.share} of the values of {held_out.hash_of!r}",
            fix="raise input.validation.share, or hash a feature with more values",
        )
    build_own_metrics(config)  # Tried before anything is written.
    build_measures(config)
    if not config.evaluation.filter or not is_validated(config, data.manifest):
        return None
    return _describe_filter(config, data)


def _describe_filter(config: TrainConfig, data: TrainingData) -> str:
    asked = config.evaluation.filter
    if config.input.validation is None:
        of = f"{data.manifest.split('validation').rows:,} rows of the validation split"
        rows = data.filtered_rows("validation", asked)
    else:
        of = f"{data.held_out_rows(config.input):,} rows that input.validation holds out"
        rows = data.held_out_rows(config.input, asked)
    conditions = [item.model_dump(mode="json") for item in asked]
    require_passing(conditions, rows, of)
    return f"validation is of {rows:,} of {of}: {describe_conditions(conditions)}"


def _build_ranking(config: TrainConfig, data: TrainingData, batches: int | None) -> Validate:
    evaluation = config.evaluation
    where, held_out, split = (data.version_dir, data.manifest), None, "validation"
    if config.input.validation is not None:
        split = TRAIN
        held_out = HeldOutRows.read(*where, config.input, mask_seen=evaluation.mask_seen)
    if held_out is None or held_out.met is None:
        warn_unmasked(data.manifest, evaluation.mask_seen, split)
    ranking = FullRanking(
        build_measures(config),
        evaluation.mask_seen,
        evaluation.batch_size,
        held_out,
        batches,
        evaluation.filter,
        find_relevance(config, data.manifest, split),
    )

    def validate(model: Model) -> dict[str, float]:
        return evaluate_full(require_retrieval(model), data, split, ranking)

    return validate


def read_validation(
    config: TrainConfig,
    data: TrainingData,
    features: Sequence[str],
    evaluation_filter: tuple[FilterConfig, ...] = (),
    binary_labels: tuple[str, ...] = (),
) -> Iterator[Batch]:
    """Yields the rows to validate on: those of the validation split, or held out of train."""
    held_out = None if config.input.validation is None else config.input
    split, size = "validation" if held_out is None else TRAIN, config.evaluation.batch_size
    how = (data.version_dir, data.manifest, split, size, features, (), evaluation_filter)
    return read_split(*how, held_out=held_out, binary_labels=binary_labels)


def _build_task_metrics(config: TrainConfig, data: TrainingData, batches: int | None) -> Validate:
    asked = config.evaluation.filter
    compiled, own = functools.cache(compile_scores), build_own_metrics(config)
    columns = RowColumns(build_user_groups(data.version_dir, data.manifest))

    def validate(model: Any) -> dict[str, float]:
        scores = TaskScores(model, data.manifest, compiled(model), columns)
        scores.measure_own(own)
        for batch in islice(read_validation(config, data, scores.inputs, asked), batches):
            scores.update(batch)
        return summarize_tasks(model, scores.result())

    return validate


def _build_scoring(
    config: TrainConfig, data: TrainingData, label: str, batches: int | None
) -> Validate:
    def validate(model: Model) -> dict[str, float]:
        towers = require_retrieval(model)
        columns = RowColumns().with_label(data.manifest, label)
        scores = LabelScores(towers.temperature)
        features, asked = (*towers.inputs, *columns.inputs), config.evaluation.filter
        rows = read_validation(config, data, features, asked, (label,))
        for batch in islice(rows, batches):
            scores.add(columns.read(batch, score_pairs(towers, batch)).take_counted())
        found = scores.result() or {}
        metrics = {LOSS_METRIC: found.get("log_loss"), "auc": found.get("auc")}
        return {name: value for name, value in metrics.items() if value is not None}

    return validate


def is_measured(records: Sequence[EpochRecord], metric: str | None) -> bool:
    """Whether a metric has a value in any of the records: where it has none, it chooses nothing."""
    return metric is not None and not all(math.isnan(record.value(metric)) for record in records)


def find_best(records: Sequence[EpochRecord] | Sequence[StepValidation], metric: str) -> int:
    """Returns the position of the first record with the best metric; the last if all are NaN."""
    sign = -1.0 if is_minimised(metric) else 1.0
    values = [sign * record.value(metric) for record in records]
    if all(map(math.isnan, values)):
        return len(values) - 1
    comparable = [-math.inf if math.isnan(value) else value for value in values]
    return comparable.index(max(comparable))


def find_best_epoch(history: Sequence[EpochRecord], metric: str | None) -> int:
    """Returns the one-based epoch to keep: the first with the best metric, or the last."""
    return history[-1 if metric is None else find_best(history, metric)].epoch


def should_stop(
    records: Sequence[EpochRecord] | Sequence[StepValidation], config: EarlyStoppingConfig | None
) -> bool:
    if config is None or config.metric is None or not records:
        return False
    return len(records) - 1 - find_best(records, config.metric) >= config.patience


class StepValidations:
    """Validations every some steps, if any; without `stopping` they choose nothing."""

    def __init__(
        self,
        every_steps: int | None,
        stopping: EarlyStoppingConfig | None,
        records: Sequence[StepValidation],
        logs: tuple[RecordLog[StepValidation] | NullWriter, EpochLog | NullWriter],
        measure: Callable[[ResumeState], Mapping[str, float]],
    ) -> None:
        self.records = list(records)
        self._every_steps, self._stopping = every_steps, stopping
        (self._log, self._board), self._measure = logs, measure

    @property
    def best(self) -> StepValidation | None:
        """The validation that chooses the weights; None: an epoch does, or there is none yet."""
        if self._stopping is None or self._stopping.metric is None or not self.records:
            return None
        return self.records[find_best(self.records, self._stopping.metric)]

    def is_due(self, step: int) -> bool:
        done = self.records[-1].step if self.records else 0
        return self._every_steps is not None and step > done and step % self._every_steps == 0

    def update(self, state: ResumeState, step: int) -> bool:
        record = StepValidation(step, state.position.epoch + 1, dict(self._measure(state)))
        self.records.append(record)
        self._log.write(record)
        self._log.sync()  # No later checkpoint is without it.
        scalars = {f"step_validation/{name}": v for name, v in record.validation.items()}
        self._board.write_scalars(step, scalars)
        return self.best is record

    def should_stop(self) -> bool:
        return should_stop(self.records, self._stopping)
