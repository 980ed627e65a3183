"""Registry of models: from a config's `name` to the class that builds it."""

from __future__ import annotations

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.training.models import ModelConfig
from training.models.dssm import DSSM
from training.models.mf import MatrixFactorization
from training.models.retrieval import RetrievalModel

MODELS: dict[str, type[RetrievalModel]] = {
    "dssm": DSSM,
    "mf": MatrixFactorization,
}


def build_model(config: ModelConfig, manifest: Manifest, seed: int) -> RetrievalModel:
    """Builds a model with its first weights; call it under the strategy's scope.

    Args:
        config: The model's config; its `name` picks the class.
        manifest: The dataset version whose features the model reads.
        seed: Seed of the first weights.

    Raises:
        ConfigError: The model is unknown, or names features that it cannot read.
    """
    if config.name not in MODELS:
        raise ConfigError(
            "no such model",
            received=config.name,
            allowed=", ".join(sorted(MODELS)),
            fix=did_you_mean(config.name, MODELS),
        )
    return MODELS[config.name](config, manifest, seed)
