"""Registry of models: from a config to the class that builds it."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest
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
from training.models.ranking import RankingModel
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
        return RankingModel(config, manifest, seed, dtype)
    if isinstance(config, DSSMConfig):
        return DSSM(config, manifest, seed, dtype)
    if isinstance(config, YouTubeDNNConfig):
        return build_youtube_dnn(config, manifest, seed, dtype)
    if isinstance(config, SequenceConfig):
        return SequenceModel(config, manifest, seed, dtype)
    return MatrixFactorization(config, manifest, seed)
