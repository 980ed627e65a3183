"""Models, their tasks, and pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from conf.config_base import OWN_CODE_PATTERN, Name, StrictFinite, default_tag, keep_apart
from conf.training.objectives import (
    BinaryConfig,
    LabelLossConfig,
    NegativesConfig,
    ObjectiveConfig,
    SampledSoftmaxConfig,
    SoftmaxConfig,
    TaskObjectiveConfig,
)
from conf.training.tables import EmbeddingsConfig


class TaskConfig(StrictFinite):
    """A score that a ranking model learns from one label."""

    label: str | None = Field(None, description="Feature of role label; None: the task's name.")
    objective: TaskObjectiveConfig = Field(LabelLossConfig(), description="Loss of the task.")
    weight: float = Field(1.0, gt=0, description="Of the task's loss in the sum over tasks.")


Combiner = Literal["mean", "sum", "max", "last", "none"]


class PoolingConfig(StrictFinite):
    """How a list becomes one vector or number, or the input of a network that reads positions."""

    combiner: Combiner | None = Field(
        None,
        description="none: all positions, with a mask. Left out: as the network reads the list "
        "(fm and deepfm: each element is a field), else sum with weights of the build, else mean.",
    )
    weights: str | None = Field(
        None, description="List feature that the positions' rows are multiplied by."
    )


class VectorConfig(StrictFinite):
    """Numbers in a feature of bytes, as numpy's `tobytes` writes them; none: zeros."""

    decode: Literal["float64", "float32"] = Field(description="Little-endian.")
    length: int = Field(ge=1, description="Numbers in a vector.")


class OwnTowerConfig(StrictFinite):
    """A tower of one's own: a Keras network from named inputs to a vector for each row."""

    function: str = Field(
        pattern=OWN_CODE_PATTERN, description="`package.module:function` of one's own."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the function."
    )

    @field_validator("params")
    @classmethod
    def _keep_given_apart(cls, params: dict[str, Any]) -> dict[str, Any]:
        return keep_apart(params, "inputs", "output_dim")


class EmbeddingSettings(StrictFinite):
    """Tables of all models."""

    embedding_dim: int = Field(
        64, ge=1, description="Length of a table's rows, where `embeddings` sets no other."
    )
    embedding_stddev: float = Field(0.05, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(
        default_factory=dict, description="Settings of tables, by name."
    )
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")


class FeatureSettings(EmbeddingSettings):
    """Lists and vectors of models that read more than ids."""

    pooling: dict[str, PoolingConfig] = Field(
        default_factory=dict,
        description="Of list features, by name; left out: as the network reads them, else mean.",
    )
    vectors: dict[str, VectorConfig] = Field(
        default_factory=dict, description="How features of bytes are read, by name."
    )


class RetrievalSettings(EmbeddingSettings):
    """Users and items as vectors of one space."""

    kind: Literal["retrieval"] = "retrieval"
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    temperature: float = Field(1.0, gt=0, description="Scores are divided by it.")
    objective: ObjectiveConfig = Field(SampledSoftmaxConfig(), description="What is learned.")


class ItemTowerSettings(StrictFinite):
    """An item tower."""

    item_features: tuple[str, ...] | None = Field(
        None, description="None: all of role item. The id alone is a row of its table."
    )
    item_hidden_units: tuple[int, ...] = Field(
        (), description="Sizes of the item tower's hidden layers."
    )


class MFConfig(RetrievalSettings):
    """Matrix factorization: dot product of a user's and an item's embedding, plus item bias."""

    name: Literal["mf"] = "mf"
    embedding_stddev: float = Field(0.1, gt=0, description="Of the tables' first values.")
    item_bias: bool = Field(True, description="A learned bias per item.")
    user_bias: bool = Field(
        False,
        description="A bias per user and one for all: they move all items alike, and make scores "
        "the logits of `binary`.",
    )


class TowerSettings(RetrievalSettings, FeatureSettings):
    """A user tower over pooled features."""

    embedding_dim: int = Field(
        32, ge=1, description="Length of a table's rows, where `embeddings` sets no other."
    )
    user_hidden_units: tuple[int, ...] = Field(
        (), description="Sizes of the user tower's hidden layers."
    )
    user_tower: OwnTowerConfig | None = Field(
        None, description="A tower of one's own in the place of the user's layers."
    )
    user_features: tuple[str, ...] | None = Field(
        None, description="None: all of role user; of youtube_dnn but the user's id."
    )
    batch_normalization: bool = Field(
        False, description="Before the activation of hidden layers, by the rows of all replicas."
    )
    dropout: float | None = Field(None, gt=0, lt=1, description="Behind each hidden layer.")
    history_pooling: Literal["mean", "position_weighted"] = Field(
        "mean", description="position_weighted learns how much the k-th latest item counts."
    )

    @model_validator(mode="after")
    def _has_one_user_tower(self) -> Self:
        if self.user_tower and self.user_hidden_units:
            raise ValueError(
                "user_tower stands in the place of the layers of user_hidden_units: leave one of "
                "them out"
            )
        return self


class DSSMConfig(ItemTowerSettings, TowerSettings):
    """Two towers over pooled embeddings, L2-normalised, compared by a scaled cosine."""

    name: Literal["dssm"] = "dssm"
    normalize: bool = Field(True, description="Vectors of length one: the score is a cosine.")
    temperature: float = Field(0.07, gt=0, description="Scores are divided by it.")


class YouTubeDNNConfig(TowerSettings):
    """A tower over what the user did, without the user's id, against a vector per item."""

    name: Literal["youtube_dnn"] = "youtube_dnn"
    objective: ObjectiveConfig = Field(
        SampledSoftmaxConfig(
            negatives=NegativesConfig(source="uniform", count=800), mask="user_items"
        ),
        description="What is learned.",
    )


class SequenceSettings(ItemTowerSettings, RetrievalSettings, FeatureSettings):
    """A network that reads the user's sequence, in the place of the user tower."""

    sequence: tuple[Name, ...] | None = Field(
        None,
        min_length=1,
        description="Lists of one length whose vectors are added up at each position, that of the "
        "items first; None: keys.history.",
    )
    user_features: tuple[str, ...] = Field(
        (), description="Joined to what the network makes of the sequence, before a projection."
    )
    hidden_units: tuple[int, ...] = Field(
        (), description="Hidden layers behind the network, and a projection."
    )
    dropout: float | None = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of values that a training step sets to zero; None: none.",
    )
    embedding_stddev: float = Field(0.02, gt=0, description="Of the tables' first values.")
    objective: ObjectiveConfig = Field(SoftmaxConfig(), description="What is learned.")


class EveryPositionSettings(SequenceSettings):
    """Positions that look back: each has a vector of the user."""

    every_position: bool = Field(
        True, description="Each item of the sequence is a target; false: the row's own alone."
    )


class AttentionSettings(SequenceSettings):
    """Blocks of attention over a sequence."""

    blocks: int = Field(2, ge=1, description="Blocks, one behind the other.")
    heads: int = Field(1, ge=1, description="Heads of attention; they divide embedding_dim.")

    @model_validator(mode="after")
    def _heads_of_one_size(self) -> Self:
        if self.embedding_dim % self.heads:
            raise ValueError("`heads` must divide `embedding_dim`")
        return self


class SASRecConfig(AttentionSettings, EveryPositionSettings):
    """Self-attention that looks back, trained at every position of the sequence."""

    name: Literal["sasrec"] = "sasrec"
    block: Literal["transformer", "ligr"] = Field(
        "transformer",
        description="ligr: gated residuals and a SwiGLU feed-forward layer, as in eSASRec.",
    )


class HSTUConfig(AttentionSettings, EveryPositionSettings):
    """Pointwise attention that looks back, with biases of positions and times."""

    name: Literal["hstu"] = "hstu"
    times: Name | None = Field(
        None,
        description="List beside the sequence: `gaps` of the history, or the time column that the "
        "history carries along; None: positions alone.",
    )
    request_time: Name | None = Field(
        None,
        description="Feature of role user beside times of a column: the time of the row's event. "
        "None: a position knows the time of its own item. Gaps say it by themselves.",
    )
    normalize: bool = Field(True, description="Vectors of length one: the score is a cosine.")
    temperature: float = Field(0.05, gt=0, description="Scores are divided by it.")

    @model_validator(mode="after")
    def _request_beside_times(self) -> Self:
        if self.request_time is not None and self.times is None:
            raise ValueError("`request_time` says when the row's event was: set `times` too")
        return self


class GRUConfig(EveryPositionSettings):
    """Gated recurrent units, trained at every position of the sequence."""

    name: Literal["gru"] = "gru"


class BSTConfig(AttentionSettings):
    """The transformer of BST over the sequence, without the target: the score is a product."""

    name: Literal["bst"] = "bst"
    blocks: int = Field(1, ge=1, description="Blocks, one behind the other.")
    heads: int = Field(8, ge=1, description="Heads of attention; they divide embedding_dim.")


class ComiRecConfig(SequenceSettings):
    """Several vectors of a user, its interests: each is a weighting of the sequence's items."""

    name: Literal["comirec"] = "comirec"
    interests: int = Field(
        4, ge=1, description="Vectors of a user; not more than the sequence has positions."
    )
    dropout: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of values that a training step sets to zero; None: none.",
    )


class RankingConfig(FeatureSettings):
    """A score per task from every feature of a row, by a built-in network or one of one's own."""

    kind: Literal["ranking"] = "ranking"
    embedding_dim: int = Field(
        16, ge=1, description="Length of a table's rows, where `embeddings` sets no other."
    )
    network: str = Field(
        "deepfm", description="A built-in network, or `package.module:function` of one's own."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the network's function."
    )
    features: tuple[str, ...] | None = Field(
        None, description="None: all but labels, weights of rows and features of role id."
    )
    biases: bool | None = Field(
        None, description="A weight per id beside its vector; None: as the network needs."
    )
    tasks: dict[Name, TaskConfig] = Field(
        default_factory=dict, description="Empty: one binary task of the dataset's label."
    )
    calibration: Literal["isotonic"] | None = Field(
        None,
        description="isotonic: probabilities of binary tasks follow the rates of the rows to "
        "validate on; fitted when training has ended.",
    )

    @property
    def name(self) -> str:
        """Name of the network."""
        return self.network

    @field_validator("params")
    @classmethod
    def _keep_tasks_apart(cls, params: dict[str, Any]) -> dict[str, Any]:
        return keep_apart(params, "inputs", "tasks", "base_scores")


SequenceConfig = SASRecConfig | HSTUConfig | GRUConfig | BSTConfig | ComiRecConfig
RetrievalConfig = Annotated[
    MFConfig | DSSMConfig | YouTubeDNNConfig | SequenceConfig,
    Field(discriminator="name"),
    default_tag("name", "dssm"),
]


def _find_kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("kind", "retrieval"))
    return str(getattr(value, "kind", "retrieval"))


ModelConfig = Annotated[
    Annotated[RetrievalConfig, Tag("retrieval")] | Annotated[RankingConfig, Tag("ranking")],
    Discriminator(_find_kind),
]


def learns_label(model: ModelConfig) -> bool:
    """Whether a model learns the label of its rows, by a binary objective."""
    objective = getattr(model, "objective", None)
    return isinstance(objective, BinaryConfig) and objective.reads_label
