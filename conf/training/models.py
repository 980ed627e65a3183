"""Models, their objectives and tasks, pooling, and the settings of their embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from conf.config_base import Name, StrictFinite, default_tag
from conf.training.table_rules import AdmissionConfig, EvictionConfig

MOST_ROWS = 1 << 40
"""More than any machine has memory for, and far from where 64 bits end."""


class NormalConfig(StrictFinite):
    """First values from a normal distribution of mean 0."""

    kind: Literal["normal"] = "normal"
    stddev: float = Field(0.05, gt=0)


class TruncatedNormalConfig(StrictFinite):
    """As `normal`, without what is more than two standard deviations from 0."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    stddev: float = Field(0.05, gt=0, description="Before it is truncated.")


class UniformConfig(StrictFinite):
    """First values that are equally likely in `[low, high)`."""

    kind: Literal["uniform"] = "uniform"
    low: float = -0.05
    high: float = 0.05

    @model_validator(mode="after")
    def _rising(self) -> UniformConfig:
        if self.low >= self.high:
            raise ValueError("`high` must be above `low`")
        return self


Initializer = NormalConfig | TruncatedNormalConfig | UniformConfig
InitializerConfig = Annotated[
    Initializer, Field(discriminator="kind"), default_tag("kind", "normal", alone=True)
]


class TableSettings(StrictFinite):
    """What tables of both kinds can be told."""

    dim: int | Literal["auto"] | None = Field(
        None,
        description="Length of a row; auto: 6 * floor(vocabulary ** 0.25); "
        "None: model.embedding_dim.",
    )
    initializer: InitializerConfig | None = Field(
        None, description="First values; None: normal, by model.embedding_stddev."
    )
    trainable: bool = Field(True, description="false: rows keep their first values.")
    l2: float | None = Field(
        None,
        gt=0,
        description="Weight of the squared norms of the rows that a batch looks up; None: "
        "model.embedding_l2.",
    )

    @field_validator("dim")
    @classmethod
    def _positive(cls, dim: int | str | None) -> int | str | None:
        if isinstance(dim, int) and dim < 1:
            raise ValueError("it must be 1 or more, or auto")
        return dim

    @model_validator(mode="after")
    def _frozen_rows_stay(self) -> Self:
        if not self.trainable and self.l2 is not None:
            raise ValueError("`l2` changes rows, and `trainable: false` keeps them")
        return self


class StaticTableConfig(TableSettings):
    """A row for each id of a vocabulary, from the start on."""

    kind: Literal["static"] = "static"
    dense: bool = Field(
        False,
        description="All rows are updated in each step, as dense weights are, and `l2` is that of "
        "the whole table; for small tables.",
    )

    @model_validator(mode="after")
    def _frozen_rows_are_not_updated(self) -> Self:
        if self.dense and not self.trainable:
            raise ValueError("`dense` updates all rows, and `trainable: false` none")
        return self


class DynamicTableConfig(TableSettings):
    """A row for each key that training meets, whatever its value; made when it is met."""

    kind: Literal["dynamic"] = "dynamic"
    features: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Features that share the table; None: those whose table has its name.",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        le=MOST_ROWS,
        description="Keys that get a row, at most; further ones read zeros.",
    )
    capacity: int = Field(
        65_536,
        ge=1,
        le=MOST_ROWS,
        description="Rows that memory is reserved for from the start.",
    )
    admission: AdmissionConfig | None = Field(
        None, description="Which keys get a row; None: all, when they are met."
    )
    eviction: EvictionConfig | None = Field(
        None, description="Which keys lose theirs; None: none does."
    )

    @model_validator(mode="after")
    def _is_full_at_some_time(self) -> DynamicTableConfig:
        if self.eviction and self.eviction.when_full and self.max_rows is None:
            raise ValueError("`eviction.when_full` needs `max_rows`: without it no table is full")
        return self

    @field_validator("dim")
    @classmethod
    def _needs_no_vocabulary(cls, dim: int | str | None) -> int | str | None:
        if dim == "auto":
            raise ValueError("auto needs the size of a vocabulary, and keys have none: a number")
        return dim


_OF_DYNAMIC = set(DynamicTableConfig.model_fields) - set(StaticTableConfig.model_fields)


def _find_table_kind(value: Any) -> Any:
    """Takes an entry that only sets what static tables have too for a static one."""
    if not isinstance(value, Mapping) or "kind" in value or _OF_DYNAMIC & set(value):
        return value
    is_static = bool(set(StaticTableConfig.model_fields) & set(value))
    return {"kind": "static", **value} if is_static else value


TableConfig = Annotated[
    StaticTableConfig | DynamicTableConfig,
    Field(discriminator="kind"),
    default_tag("kind", "dynamic", alone=True),
    BeforeValidator(_find_table_kind),
]
EmbeddingsConfig = dict[Annotated[str, Field(min_length=1)], TableConfig]
"""Tables by name: a feature's, that of what features share, or a new one that names `features`."""


class SampledSoftmaxConfig(StrictFinite):
    """Softmax over the batch's own items, corrected for how often each is drawn."""

    kind: Literal["sampled_softmax"] = "sampled_softmax"
    logq_correction: bool = True
    mask_accidental_hits: bool = True
    uniform_negatives: int | None = Field(
        None, ge=1, description="Items drawn uniformly from the catalogue, added to the batch's."
    )


class BinaryConfig(StrictFinite):
    """Sigmoid cross-entropy on the label; makes AUC and log loss meaningful."""

    kind: Literal["binary"] = "binary"


ObjectiveConfig = Annotated[
    SampledSoftmaxConfig | BinaryConfig,
    Field(discriminator="kind"),
    default_tag("kind", "sampled_softmax"),
]


class SquaredErrorConfig(StrictFinite):
    """Squared difference of score and label; makes RMSE and MAE meaningful."""

    kind: Literal["squared_error"] = "squared_error"


TaskObjectiveConfig = Annotated[
    BinaryConfig | SquaredErrorConfig,
    Field(discriminator="kind"),
    default_tag("kind", "binary", alone=True),
]


class TaskConfig(StrictFinite):
    """A score that a ranking model learns from one label."""

    label: str | None = Field(None, description="Feature of role label; None: the task's name.")
    objective: TaskObjectiveConfig = BinaryConfig()
    weight: float = Field(1.0, gt=0, description="Of the task's loss in the sum over tasks.")


Combiner = Literal["mean", "sum", "max", "last", "none"]


class PoolingConfig(StrictFinite):
    """How a list becomes one vector or number, or the input of a network that reads positions."""

    combiner: Combiner | None = Field(
        None,
        description="none: all positions, with a mask. Left out: as the network reads the list, "
        "else sum with weights of the build, else mean.",
    )
    weights: str | None = Field(
        None, description="List feature that the positions' rows are multiplied by."
    )
    softmax: bool = Field(False, description="Weights by softmax over the list's tokens.")
    ids: str | None = Field(
        None,
        description="Of a list of numbers: the list of ids beside it, whose padding is its own; "
        "None: zeros at its end are padding.",
    )


class VectorConfig(StrictFinite):
    """Numbers in a feature of bytes, as numpy's `tobytes` writes them; none: zeros."""

    decode: Literal["float64", "float32"] = Field(description="Little-endian.")
    length: int = Field(ge=1, description="Numbers in a vector.")


Poolings = dict[str, PoolingConfig]
Vectors = dict[str, VectorConfig]


class MFConfig(StrictFinite):
    """Matrix factorization: dot product of a user's and an item's embedding, plus item bias."""

    kind: Literal["retrieval"] = "retrieval"
    name: Literal["mf"] = "mf"
    embedding_dim: int = Field(64, ge=1)
    item_bias: bool = True
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    embedding_stddev: float = Field(0.1, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(default_factory=dict)
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
    temperature: float = Field(1.0, gt=0)
    objective: ObjectiveConfig = SampledSoftmaxConfig()


class DSSMConfig(StrictFinite):
    """Two towers over pooled embeddings, L2-normalised, compared by a scaled cosine."""

    kind: Literal["retrieval"] = "retrieval"
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
    pooling: Poolings = Field(
        default_factory=dict, description="Of list features, by name; left out: mean."
    )
    vectors: Vectors = Field(
        default_factory=dict, description="How features of bytes are read, by name."
    )
    embedding_stddev: float = Field(0.05, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(default_factory=dict)
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
    temperature: float = Field(0.07, gt=0)
    objective: ObjectiveConfig = SampledSoftmaxConfig()


class RankingConfig(StrictFinite):
    """A score per task from every feature of a row, by a built-in network or one of one's own."""

    kind: Literal["ranking"] = "ranking"
    network: str = Field(
        "deepfm", description="A built-in network, or `package.module:function` of one's own."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the network's function."
    )
    features: tuple[str, ...] | None = Field(
        None, description="None: all but labels, weights of rows and features of role id."
    )
    pooling: Poolings = Field(
        default_factory=dict,
        description="Of list features, by name; left out: as the network reads them, else mean.",
    )
    vectors: Vectors = Field(
        default_factory=dict, description="How features of bytes are read, by name."
    )
    biases: bool | None = Field(
        None, description="A weight per id beside its vector; None: as the network needs."
    )
    tasks: dict[Name, TaskConfig] = Field(
        default_factory=dict, description="Empty: one binary task of the dataset's label."
    )
    embedding_dim: int = Field(16, ge=1)
    embedding_stddev: float = Field(0.05, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(default_factory=dict)
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")

    @property
    def name(self) -> str:
        """Name of the network."""
        return self.network

    @field_validator("params")
    @classmethod
    def _keep_tasks_apart(cls, params: dict[str, Any]) -> dict[str, Any]:
        if taken := {"inputs", "tasks", "base_scores"} & set(params):
            raise ValueError(f"{', '.join(sorted(taken))}: Sluice sets it; leave it out of params")
        return params


RetrievalConfig = Annotated[
    MFConfig | DSSMConfig, Field(discriminator="name"), default_tag("name", "dssm")
]


def _find_kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("kind", "retrieval"))
    return str(getattr(value, "kind", "retrieval"))


ModelConfig = Annotated[
    Annotated[RetrievalConfig, Tag("retrieval")] | Annotated[RankingConfig, Tag("ranking")],
    Discriminator(_find_kind),
]
