"""Registry of models: from a config to the class that builds it."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest
from conf.training.input import InputConfig
from conf.training.models import (
    DSSMConfig,
    ModelConfig,
    RankingConfig,
    SequenceConfig,
    YouTubeDNNConfig,
)
from training.models.dssm import DSSM, build_youtube_dnn
from training.models.mf import MatrixFactorization
from training.models.model import Model
from training.models.ranking import NetworkRankingModel, find_balance_calibrations
from training.models.retrieval import tell_later_items
from training.models.sequence import SequenceModel


def build_model(
    config: ModelConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
) -> Model:
    """Builds a model with its first weights; call it under the strategy's scope.

    Args:
        config: The model's config; its kind and name pick the class.
        manifest: The dataset version whose features the model reads.
        seed: Seed of the first weights.
        dtype: Type that its networks compute in; weights are float32 in any case.

    Raises:
        ConfigError: The model names features that it cannot read.
    """
    if isinstance(config, RankingConfig):
        return NetworkRankingModel(config, manifest, seed, dtype)
    if isinstance(config, DSSMConfig):
        return DSSM(config, manifest, seed, dtype)
    if isinstance(config, YouTubeDNNConfig):
        return build_youtube_dnn(config, manifest, seed, dtype)
    if isinstance(config, SequenceConfig):
        return SequenceModel(config, manifest, seed, dtype)
    return MatrixFactorization(config, manifest, seed)


def undo_balance(model: Model, config: InputConfig, manifest: Manifest) -> list[str]:
    """Sets what undoes a balance of classes outside of training.

    Args:
        model: The model; one that retrieves stays as it is.
        config: How its train split is read.
        manifest: The dataset version.

    Returns:
        What to tell of probabilities that stay those of balanced rows.
    """
    balance = config.class_balance
    if balance is None:
        return []
    if not isinstance(model, NetworkRankingModel):
        return [
            "input.class_balance is not undone of a retrieval model: where it gives probabilities, "
            "they, their log loss and their calibration are those of the rows that are drawn"
        ]
    model.calibrate(find_balance_calibrations(model.tasks, config, manifest))
    binary = [one for one in model.tasks if one.is_binary and one.name not in model.calibrations]
    tasks = [one.name for one in binary if one.label == balance.feature]
    others = [one.name for one in binary if one.label != balance.feature]
    advice = "model.calibration=isotonic fits them to the rows to validate on"
    notes = []
    if tasks:
        notes.append(
            "input.class_balance changes the share of label 1, and nothing says what it was in the "
            f"rows that input.filter, take and mix leave: probabilities of {', '.join(tasks)} are "
            f"those of balanced rows; {advice}"
        )
    if others:
        notes.append(
            f"input.class_balance draws rows by {balance.feature}: probabilities of "
            f"{', '.join(others)} are those of the rows that are drawn; {advice}"
        )
    return notes


def copy_calibrations(source: Model, target: Model) -> None:
    """Sets the calibrations of a model that is another one's copy; see `NetworkRankingModel`."""
    if isinstance(source, NetworkRankingModel) and isinstance(target, NetworkRankingModel):
        target.calibrate(source.calibrations)


def list_model_notes(model: Model, manifest: Manifest) -> tuple[str, ...]:
    """Returns what to tell those who train a model on a dataset version, a line each."""
    return (*model.notes, *tell_later_items(model, manifest))
