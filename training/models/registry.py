"""From a model's config to the class that builds it."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest
from conf.training.models import ModelConfig, RankingConfig, SequenceConfig, TowerSettings
from training.models.model import Model
from training.models.ranking import NetworkRankingModel
from training.models.sequence import SequenceModel
from training.models.two_towers import DSSM, MatrixFactorization


def build_model(
    config: ModelConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
) -> Model:
    """Builds a model with its first weights; call it under the strategy's scope.

    Its networks compute in `dtype`; weights are float32 in any case.
    """
    if isinstance(config, RankingConfig):
        return NetworkRankingModel(config, manifest, seed, dtype)
    if isinstance(config, TowerSettings):
        return DSSM(config, manifest, seed, dtype)
    if isinstance(config, SequenceConfig):
        return SequenceModel(config, manifest, seed, dtype)
    return MatrixFactorization(config, manifest, seed)
