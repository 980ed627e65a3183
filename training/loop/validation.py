"""Validation after each epoch, and between them.

The validation split is ranked. Rows of train that `input.validation` holds out stand in its
place: ranked too where the objective is a softmax over items, so that each row is a positive;
scored against their labels where it is binary, as rows of label 0 have no target to rank.
Of both, `evaluation.filter` leaves the rows alone that it measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from conf.errors import ConfigError, TooFewRowsError
from conf.manifest import Manifest
from conf.metrics import LOSS_METRIC
from conf.splits import TRAIN
from conf.training.input import FilterConfig, describe_conditions
from conf.training.models import RankingConfig
from conf.training.train import TrainConfig
from training.evaluation.evaluate import FullRanking, evaluate_full
from training.evaluation.own_metrics import (
    build_measures,
    build_own_metrics,
    check_own_metrics,
)
from training.evaluation.protocols import (
    HeldOutRows,
    find_relevance,
    learns_label,
    warn_unmasked,
)
from training.evaluation.scored_rows import RowColumns, build_user_groups
from training.evaluation.systems import score_pairs
from training.evaluation.tasks import LabelScores, TaskScores, compile_scores, summarize_tasks
from training.input.batches import (
    Batch,
    build_eval_dataset,
    build_held_out_dataset,
    read_batches,
)
from training.models.model import Model
from training.models.ranking import RankingModel
from training.models.retrieval import require_retrieval
from training.reader.filters import EVALUATION_FILTER
from training.reader.training_data import TrainingData

Validate = Callable[[Model], dict[str, float]]


def is_validated(config: TrainConfig, manifest: Manifest) -> bool:
    """Whether there are rows to validate on."""
    return config.input.validation is not None or manifest.has_split("validation")


def is_scored_by_label(config: TrainConfig) -> bool:
    """Whether validation compares scores with labels, rather than ranking targets."""
    if isinstance(config.model, RankingConfig):
        return True
    return config.input.validation is not None and learns_label(config.model)


def build_validate(
    config: TrainConfig, data: TrainingData, batches: int | None = None
) -> Validate | None:
    """Returns the function of a model to its validation metrics; None: nothing to validate on.

    The metrics are those of `evaluate_full`; or, of held-out rows with labels, `loss` (log loss)
    and, where both classes occur, `auc`.

    Args:
        config: The run's config.
        data: The dataset version.
        batches: How many batches are read, the first ones; None: all.
    """
    if not is_validated(config, data.manifest):
        return None
    if isinstance(config.model, RankingConfig):
        return _build_task_metrics(config, data, batches)
    label = data.manifest.keys.label
    if is_scored_by_label(config) and label is not None:
        return _build_scoring(config, data, label, batches)
    return _build_ranking(config, data, batches)


def build_step_validate(config: TrainConfig, data: TrainingData) -> Validate | None:
    """Returns the validation of `fit.validation`; None: there is none between epochs.

    Raises:
        ConfigError: There are no rows to validate on.
    """
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
    """Refuses an `input.validation` that holds out nothing, and a filter that leaves nothing.

    Returns:
        Which rows validation is of, in words, where `evaluation.filter` leaves some out.

    Raises:
        TooFewRowsError: No key hashes into the share, or no row passes the filter.
        InputDataError: A shard is damaged, or the filter names an unknown feature.
        ConfigError: A value of the filter is not of its feature's type, or a metric of one's own
            does not work.
    """
    _check_held_out(config, data)
    check_own_metrics(config)
    evaluation_filter = config.evaluation.filter
    if not evaluation_filter or not is_validated(config, data.manifest):
        return None
    if config.input.validation is None:
        listed, what = data.manifest.split("validation").rows, "of the validation split"
        rows = data.filtered_rows("validation", evaluation_filter)
    else:
        listed, what = data.held_out_rows(config.input), "that input.validation holds out"
        rows = data.held_out_rows(config.input, evaluation_filter)
    conditions = describe_conditions(item.model_dump(mode="json") for item in evaluation_filter)
    if not rows:
        raise TooFewRowsError(
            f"{EVALUATION_FILTER} leaves no row to validate on",
            received=f"{conditions}: none of {listed:,} rows {what}",
            allowed="a filter that at least one of them passes",
            fix=f"change {EVALUATION_FILTER}; features hold encoded values, such as the ids of a "
            "vocabulary: `sluice inspect --head 5` shows them",
        )
    return f"validation is of {rows:,} of {listed:,} rows {what}: {conditions}"


def _check_held_out(config: TrainConfig, data: TrainingData) -> None:
    if config.input.validation is not None and not data.held_out_rows(config.input):
        held_out = config.input.validation
        raise TooFewRowsError(
            "input.validation holds out no rows",
            received=f"share {held_out.share} of the values of {held_out.hash_of!r}",
            allowed="a share that at least one value falls into",
            fix="raise input.validation.share, or hash a feature with more values",
        )


def _build_ranking(config: TrainConfig, data: TrainingData, batches: int | None) -> Validate:
    evaluation = config.evaluation
    where, held_out = (data.version_dir, data.manifest), None
    split, evaluation_filter = "validation", evaluation.filter
    if config.input.validation is not None:
        split, mask = TRAIN, evaluation.mask_seen
        held_out = HeldOutRows.read(*where, config.input, mask_seen=mask)
    if held_out is None or held_out.met is None:
        warn_unmasked(data.manifest, evaluation.mask_seen, split)
    ranking = FullRanking(
        build_measures(config),
        evaluation.mask_seen,
        evaluation.batch_size,
        held_out,
        batches,
        evaluation_filter,
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
) -> Iterator[Batch]:
    """Yields the rows to validate on: those of the validation split, or held out of train.

    Args:
        config: The run's config.
        data: The dataset version.
        features: Names to read.
        evaluation_filter: What rows must pass.

    Raises:
        InputDataError: The split is not there, or a record is damaged.
    """
    where, size = (data.version_dir, data.manifest), config.evaluation.batch_size
    if config.input.validation is None:
        split = "validation"
        dataset = build_eval_dataset(
            *where, split, size, features, evaluation_filter=evaluation_filter
        )
    else:
        split = TRAIN
        dataset = build_held_out_dataset(
            *where, config.input, size, features, evaluation_filter=evaluation_filter
        )
    yield from read_batches(dataset, *where, split)


def _build_task_metrics(config: TrainConfig, data: TrainingData, batches: int | None) -> Validate:
    evaluation_filter = config.evaluation.filter
    compiled, own = functools.cache(compile_scores), build_own_metrics(config.evaluation.metrics)
    columns = RowColumns(build_user_groups(data.version_dir, data.manifest))

    def validate(model: Model) -> dict[str, float]:
        if not isinstance(model, RankingModel):
            raise TypeError(f"a {type(model).__name__} has no tasks")
        scores = TaskScores(model, data.manifest, compiled(model), columns)
        scores.measure_own(own)
        for batch in islice(
            read_validation(config, data, scores.inputs, evaluation_filter), batches
        ):
            scores.update(batch)
        return summarize_tasks(model, scores.result())

    return validate


def _build_scoring(
    config: TrainConfig, data: TrainingData, label: str, batches: int | None
) -> Validate:
    def validate(model: Model) -> dict[str, float]:
        towers = require_retrieval(model)
        columns, scores = (
            RowColumns().with_label(data.manifest, label),
            LabelScores(towers.temperature),
        )
        where = (data.version_dir, data.manifest)
        dataset = build_held_out_dataset(
            *where, config.input, config.evaluation.batch_size, (*towers.inputs, *columns.inputs),
            evaluation_filter=config.evaluation.filter, binary_labels=(label,),
        )  # fmt: skip
        for batch in islice(read_batches(dataset, *where, "train"), batches):
            scores.add(columns.read(batch, score_pairs(towers, batch)).take_counted())
        found = scores.result() or {}
        metrics = {LOSS_METRIC: found.get("log_loss"), "auc": found.get("auc")}
        return {name: value for name, value in metrics.items() if value is not None}

    return validate
