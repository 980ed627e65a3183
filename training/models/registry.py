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
from training.models.model import Model
from training.models.ranking import NetworkRankingModel
from training.models.retrieval import tell_later_items
from training.models.sequence import SequenceModel
from training.models.two_towers import DSSM, MatrixFactorization, build_youtube_dnn


def build_model(
    config: ModelConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
) -> Model:
    """Builds a model with its first weights; call it under the strategy's scope.

    Its networks compute in `dtype`; weights are float32 in any case.
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

    Returns what to tell of probabilities that stay those of balanced rows.
    """
    if config.class_balance is None:
        return []
    if isinstance(model, NetworkRankingModel):
        return model.undo_balance(config, manifest)
    return [
        "input.class_balance is not undone of a retrieval model: where it gives probabilities, "
        "they, their log loss and their calibration are those of the rows that are drawn"
    ]


def copy_calibrations(source: Model, target: Model) -> None:
    """Sets the calibrations of a model that is another one's copy; see `NetworkRankingModel`."""
    if isinstance(source, NetworkRankingModel) and isinstance(target, NetworkRankingModel):
        target.calibrate(source.calibrations)


def list_model_notes(model: Model, manifest: Manifest) -> tuple[str, ...]:
    """Returns what to tell those who train a model on a dataset version, a line each."""
    return (*model.notes, *tell_later_items(model, manifest))
