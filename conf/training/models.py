"""Models and their objectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conf.training.base import Finite, default_tag
from conf.training.embeddings import EmbeddingsConfig


class SampledSoftmaxConfig(Finite):
    """Softmax over the batch's own items, corrected for how often each is drawn."""

    kind: Literal["sampled_softmax"] = "sampled_softmax"
    logq_correction: bool = True
    mask_accidental_hits: bool = True
    uniform_negatives: int | None = Field(
        None, ge=1, description="Items drawn uniformly from the catalogue, added to the batch's."
    )


class BinaryConfig(Finite):
    """Sigmoid cross-entropy on the label; makes AUC and log loss meaningful."""

    kind: Literal["binary"] = "binary"


ObjectiveConfig = Annotated[
    SampledSoftmaxConfig | BinaryConfig,
    Field(discriminator="kind"),
    default_tag("kind", "sampled_softmax"),
]


class MFConfig(Finite):
    """Matrix factorization: dot product of a user's and an item's embedding, plus item bias."""

    name: Literal["mf"] = "mf"
    embedding_dim: int = Field(64, ge=1)
    item_bias: bool = True
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    embedding_stddev: float = Field(0.1, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(default_factory=dict)
    embedding_l2: float | None = Field(None, gt=0, description="On the rows of the batch.")
    temperature: float = Field(1.0, gt=0)
    objective: ObjectiveConfig = SampledSoftmaxConfig()


class DSSMConfig(Finite):
    """Two towers over pooled embeddings, L2-normalised, compared by a scaled cosine."""

    name: Literal["dssm"] = "dssm"
    embedding_dim: int = Field(32, ge=1)
    user_hidden_units: tuple[int, ...] = ()
    item_hidden_units: tuple[int, ...] = ()
    user_features: tuple[str, ...] | None = Field(None, description="None: all of role user.")
    item_features: tuple[str, ...] | None = Field(None, description="None: all of role item.")
    dropout: float | None = Field(None, gt=0, lt=1)
    history_pooling: Literal["mean", "position_weighted"] = Field(
        "mean", description="position_weighted learns how much the k-th latest item counts."
    )
    embedding_stddev: float = Field(0.05, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(default_factory=dict)
    embedding_l2: float | None = Field(None, gt=0, description="On the rows of the batch.")
    temperature: float = Field(0.07, gt=0)
    objective: ObjectiveConfig = SampledSoftmaxConfig()


ModelConfig = Annotated[
    MFConfig | DSSMConfig, Field(discriminator="name"), default_tag("name", "dssm")
]
