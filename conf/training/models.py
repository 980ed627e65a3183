"""Models, their objectives and tasks, and pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from conf.config_base import Name, StrictFinite, default_tag
from conf.training.tables import EmbeddingsConfig

NegativeSource = Literal["batch", "uniform", "frequency", "adaptive", "mixed"]


class NegativesConfig(StrictFinite):
    """Items that the item of a row is compared with, and how they are drawn."""

    source: NegativeSource = Field(
        "batch",
        description="batch: the items of the batch's rows. uniform: all items alike. frequency: by "
        "their rows in train. adaptive: by what training has met so far. mixed: batch, and drawn "
        "ones beside it.",
    )
    count: int | None = Field(None, ge=1, description="Items drawn; all sources but batch.")
    distortion: float | None = Field(
        None,
        ge=0,
        description="Items are drawn by count ** distortion; None: frequency 0.75, adaptive 1, "
        "mixed 0, which is uniform.",
    )
    hardest: int | None = Field(
        None,
        ge=1,
        description="Only so many count for a row: those that the model scores highest in the "
        "step, of the ones that `mask` leaves. None: all.",
    )

    @model_validator(mode="after")
    def _fits_the_source(self) -> NegativesConfig:
        if (self.count is None) != (self.source == "batch"):
            what = "takes no" if self.count is not None else "needs a"
            raise ValueError(f"source {self.source} {what} `count`, the number of items drawn")
        if self.distortion is not None and self.source in ("batch", "uniform"):
            raise ValueError(
                f"source {self.source} takes no `distortion`, an exponent of counts; frequency, "
                "adaptive and mixed do"
            )
        drawn = None if self.source == "mixed" else self.count
        if self.hardest is not None and drawn is not None and self.hardest >= drawn:
            raise ValueError(
                f"`hardest` {self.hardest} of {drawn} drawn items leaves nothing out; draw more by "
                "`count`"
            )
        return self


class DrawnNegativesConfig(NegativesConfig):
    """As `NegativesConfig`, for losses that compare each row with items drawn for it alone."""

    source: Literal["uniform", "frequency", "adaptive"] = Field(
        "uniform",
        description="How they are drawn: all items alike, by their rows in train, or by what "
        "training has met.",
    )
    count: int = Field(1, ge=1, description="Items drawn for each row.")


OWN_CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def keep_apart(
    params: dict[str, Any], *given: str, advice: str = "leave it out of params"
) -> dict[str, Any]:
    """Returns the parameters of a function of one's own.

    Args:
        params: Its parameters.
        given: Those that Sluice sets.
        advice: What to do with one of these.

    Raises:
        ValueError: One of `given` is among them.
    """
    if taken := sorted(set(given) & set(params)):
        raise ValueError(f"{', '.join(taken)}: Sluice sets it; {advice}")
    return params


class OwnLossConfig(StrictFinite):
    """A loss of one's own in the place of the formula: a value for each row, in TensorFlow."""

    function: str = Field(
        pattern=OWN_CODE_PATTERN,
        description="`package.module:function` of one's own. From a label: `(labels, logits)`, "
        "else `(positives, negatives, counted)`.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the function."
    )
    features: tuple[Name, ...] = Field(
        (), description="Features of the rows that its parameter `features` holds by name."
    )

    @field_validator("params")
    @classmethod
    def _keep_features_apart(cls, params: dict[str, Any]) -> dict[str, Any]:
        return keep_apart(params, "features", advice="name them in `features` beside params")


OwnLoss = Annotated[
    OwnLossConfig | None,
    Field(description="A formula of one's own in the place of the built-in one."),
]


Mask = Literal["none", "target", "user_items"]


def _read_strength(value: Any) -> Any:
    """Takes true for full strength; false and null for none."""
    return float(bool(value)) if value is None or isinstance(value, bool) else value


class ItemSettings(StrictFinite):
    """What objectives have in common to which each row is a positive."""

    positives: Literal["label", "every_row"] = Field(
        "label",
        description="label: rows of label 0 must be left out or weigh nothing; every_row: all rows "
        "are positives, whatever their label.",
    )


class SampledSoftmaxConfig(ItemSettings):
    """Softmax over sampled items, corrected for how often each is among them."""

    kind: Literal["sampled_softmax"] = "sampled_softmax"
    negatives: NegativesConfig = NegativesConfig()
    loss: OwnLoss = None
    logq_correction: Annotated[float, BeforeValidator(_read_strength)] = Field(
        1.0, ge=0, description="Strength: what log Q is multiplied by; 0: off."
    )
    mask: Mask = Field(
        "target",
        description="Negatives that are left out: copies of the row's item; or all items that its "
        "user has in train, or its history holds.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_names(cls, values: Any) -> Any:
        """Reads configs of earlier runs, which every run keeps beside its checkpoints."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        count = values.pop("uniform_negatives", None)
        if count is not None:
            values["negatives"] = {"source": "mixed", "count": count}
        if "mask_accidental_hits" in values:
            values["mask"] = "target" if values.pop("mask_accidental_hits") else "none"
        return values


class SoftmaxConfig(ItemSettings):
    """Softmax over the whole catalogue, which is embedded in each step."""

    kind: Literal["softmax"] = "softmax"
    mask: Literal["none", "user_items"] = Field(
        "none",
        description="Items that are left out beside the row's own: those that its user has in "
        "train, or its history holds.",
    )


class BPRConfig(ItemSettings):
    """Log loss of the row's item against items drawn for it: which of two is scored higher."""

    kind: Literal["bpr"] = "bpr"
    loss: OwnLoss = None
    negatives: DrawnNegativesConfig = DrawnNegativesConfig()
    mask: Mask = Field("user_items", description="Drawn items that do not count.")


class BinaryConfig(ItemSettings):
    """Sigmoid cross-entropy on the label; makes AUC and log loss meaningful.

    With `negatives` each row is a positive, and items drawn for it are the negatives.
    """

    kind: Literal["binary"] = "binary"
    loss: OwnLoss = None
    negatives: DrawnNegativesConfig | None = Field(
        None, description="None: by the label. Else it is not read."
    )
    mask: Mask = Field("user_items", description="Drawn items that do not count.")

    @property
    def reads_label(self) -> bool:
        """Whether it learns the label."""
        return self.negatives is None


ObjectiveConfig = Annotated[
    SampledSoftmaxConfig | SoftmaxConfig | BPRConfig | BinaryConfig,
    Field(discriminator="kind"),
    default_tag("kind", "sampled_softmax", alone=True),
]


class LabelLossConfig(StrictFinite):
    """Sigmoid cross-entropy on a task's label; makes AUC and log loss meaningful."""

    kind: Literal["binary"] = "binary"
    loss: OwnLoss = None


class SquaredErrorConfig(StrictFinite):
    """Squared difference of score and label; makes RMSE and MAE meaningful."""

    kind: Literal["squared_error"] = "squared_error"
    loss: OwnLoss = None


TaskObjectiveConfig = Annotated[
    LabelLossConfig | SquaredErrorConfig,
    Field(discriminator="kind"),
    default_tag("kind", "binary", alone=True),
]


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
    embedding_dim: int = Field(64, ge=1, description="Length of the vectors.")
    item_bias: bool = Field(True, description="A learned bias per item.")
    user_bias: bool = Field(
        False,
        description="A bias per user and one for all: they move all items alike, and make scores "
        "the logits of `binary`.",
    )
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    embedding_stddev: float = Field(0.1, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(
        default_factory=dict, description="Settings of tables, by name."
    )
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
    temperature: float = Field(1.0, gt=0, description="Scores are divided by it.")
    objective: ObjectiveConfig = Field(SampledSoftmaxConfig(), description="What is learned.")


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


class TowerSettings(StrictFinite):
    """What models with a user tower over pooled features have in common."""

    kind: Literal["retrieval"] = "retrieval"
    embedding_dim: int = Field(
        32, ge=1, description="Length of a table's rows, where `embeddings` sets no other."
    )
    user_hidden_units: tuple[int, ...] = Field(
        (), description="Sizes of the user tower's hidden layers."
    )
    user_tower: OwnTowerConfig | None = Field(
        None, description="A tower of one's own in the place of the user's layers."
    )
    user_features: tuple[str, ...] | None = Field(None, description="None: all of role user.")
    activation: str = Field("relu", description="dice, prelu or one of Keras'.")
    batch_normalization: bool = Field(
        False, description="Before the activation of hidden layers, by the rows of all replicas."
    )
    kernel_l2: float | None = Field(
        None, gt=0, description="Weight of the squared norms of the layers' kernels."
    )
    dropout: float | None = Field(None, gt=0, lt=1, description="Behind each hidden layer.")
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
    embeddings: EmbeddingsConfig = Field(
        default_factory=dict, description="Settings of tables, by name."
    )
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
    normalize: bool = Field(True, description="Vectors of length one: the score is a cosine.")
    temperature: float = Field(0.07, gt=0, description="Scores are divided by it.")
    objective: ObjectiveConfig = Field(SampledSoftmaxConfig(), description="What is learned.")

    @model_validator(mode="after")
    def _has_one_tower_a_side(self) -> Self:
        for side in ("user", "item"):
            if getattr(self, f"{side}_tower", None) and getattr(self, f"{side}_hidden_units"):
                raise ValueError(
                    f"{side}_tower stands in the place of the layers of {side}_hidden_units: leave "
                    "one of them out"
                )
        return self


class DSSMConfig(TowerSettings):
    """Two towers over pooled embeddings, L2-normalised, compared by a scaled cosine."""

    name: Literal["dssm"] = "dssm"
    item_tower: OwnTowerConfig | None = Field(
        None, description="A tower of one's own in the place of the item's layers."
    )
    item_hidden_units: tuple[int, ...] = Field(
        (),
        description="Sizes of the item tower's hidden layers.",
    )
    item_features: tuple[str, ...] | None = Field(None, description="None: all of role item.")
    item_dropout: float | None = Field(
        None, ge=0, lt=1, description="Of the item tower; None: `dropout`."
    )


class YouTubeDNNConfig(TowerSettings):
    """A tower over what the user did, without the user's id, against a vector per item."""

    name: Literal["youtube_dnn"] = "youtube_dnn"
    user_features: tuple[str, ...] | None = Field(
        None, description="None: all of role user but the user's id."
    )
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    temperature: float = Field(1.0, gt=0, description="Scores are divided by it.")
    objective: ObjectiveConfig = Field(
        SampledSoftmaxConfig(
            negatives=NegativesConfig(source="uniform", count=800), mask="user_items"
        ),
        description="What is learned.",
    )


class SequenceSettings(StrictFinite):
    """A network that reads the user's sequence, in the place of the user tower."""

    kind: Literal["retrieval"] = "retrieval"
    embedding_dim: int = Field(64, ge=1, description="Length of a position's vector.")
    sequence: tuple[Name, ...] | None = Field(
        None,
        min_length=1,
        description="Lists of one length whose vectors are added up at each position, that of the "
        "items first; None: keys.history.",
    )
    user_features: tuple[str, ...] = Field(
        (), description="Joined to what the network makes of the sequence, before a projection."
    )
    item_features: tuple[str, ...] | None = Field(
        None,
        description="None: all of role item. The id alone is looked up in the sequence's table.",
    )
    hidden_units: tuple[int, ...] = Field(
        (), description="Hidden layers behind the network, and a projection."
    )
    item_hidden_units: tuple[int, ...] = Field(
        (), description="Sizes of the item tower's hidden layers."
    )
    dropout: float | None = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of values that a training step sets to zero; None: none.",
    )
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    pooling: Poolings = Field(
        default_factory=dict, description="Of other list features, by name; left out: mean."
    )
    vectors: Vectors = Field(
        default_factory=dict, description="How features of bytes are read, by name."
    )
    embedding_stddev: float = Field(0.02, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(
        default_factory=dict, description="Settings of tables, by name."
    )
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
    temperature: float = Field(1.0, gt=0, description="Scores are divided by it.")
    objective: ObjectiveConfig = Field(SoftmaxConfig(), description="What is learned.")


class AttentionSettings(SequenceSettings):
    """Blocks of attention over a sequence."""

    blocks: int = Field(2, ge=1, description="Blocks, one behind the other.")
    heads: int = Field(1, ge=1, description="Heads of attention; they divide embedding_dim.")

    @model_validator(mode="after")
    def _heads_of_one_size(self) -> Self:
        if self.embedding_dim % self.heads:
            raise ValueError("`heads` must divide `embedding_dim`")
        return self


class SASRecConfig(AttentionSettings):
    """Self-attention that looks back, trained at every position of the sequence."""

    name: Literal["sasrec"] = "sasrec"
    block: Literal["transformer", "ligr"] = Field(
        "transformer",
        description="ligr: gated residuals and a SwiGLU feed-forward layer, as in eSASRec.",
    )
    feed_forward_units: int | None = Field(
        None, ge=1, description="None: embedding_dim; of ligr four times embedding_dim."
    )
    every_position: bool = Field(
        True, description="Each item of the sequence is a target; false: the row's own alone."
    )


class HSTUConfig(AttentionSettings):
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
    every_position: bool = Field(
        True, description="Each item of the sequence is a target; false: the row's own alone."
    )

    @model_validator(mode="after")
    def _request_beside_times(self) -> Self:
        if self.request_time is not None and self.times is None:
            raise ValueError("`request_time` says when the row's event was: set `times` too")
        return self


class GRUConfig(SequenceSettings):
    """Gated recurrent units, trained at every position of the sequence."""

    name: Literal["gru"] = "gru"
    layers: int = Field(1, ge=1, description="Recurrent layers, one behind the other.")
    every_position: bool = Field(
        True, description="Each item of the sequence is a target; false: the row's own alone."
    )


class BSTConfig(AttentionSettings):
    """The transformer of BST over the sequence, without the target: the score is a product."""

    name: Literal["bst"] = "bst"
    blocks: int = Field(1, ge=1, description="Blocks, one behind the other.")
    heads: int = Field(8, ge=1, description="Heads of attention; they divide embedding_dim.")
    feed_forward_units: int | None = Field(
        None, ge=1, description="None: four times embedding_dim."
    )


class ComiRecConfig(SequenceSettings):
    """Several vectors of a user, its interests: each is a weighting of the sequence's items."""

    name: Literal["comirec"] = "comirec"
    interests: int = Field(
        4, ge=1, description="Vectors of a user; not more than the sequence has positions."
    )
    attention_units: int | None = Field(
        None, ge=1, description="Hidden units of the attention; None: four times embedding_dim."
    )
    dropout: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of values that a training step sets to zero; None: none.",
    )


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
    embedding_dim: int = Field(
        16, ge=1, description="Length of a table's rows, where `embeddings` sets no other."
    )
    embedding_stddev: float = Field(0.05, gt=0, description="Of the tables' first values.")
    embeddings: EmbeddingsConfig = Field(
        default_factory=dict, description="Settings of tables, by name."
    )
    embedding_l2: float | None = Field(None, gt=0, description="`l2` of tables without one.")
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
