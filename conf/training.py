"""Configs of `sluice train`, and of the evaluation, export and prediction that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from conf.etl import Strict

METRIC_PATTERN = r"^(hit_rate|recall|ndcg)@[1-9][0-9]*$|^mrr$|^loss$"


class Finite(Strict):
    """Base of the training configs: strict, and every number is finite."""

    model_config = ConfigDict(allow_inf_nan=False)


def _default_tag(tag: str, default: str) -> BeforeValidator:
    """Lets a union's keys be given without its tag: they are those of the default member."""

    def add_tag(value: Any) -> Any:
        named = not isinstance(value, Mapping) or tag in value
        return value if named else {tag: default, **value}

    return BeforeValidator(add_tag)


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
    _default_tag("kind", "sampled_softmax"),
]


class MFConfig(Finite):
    """Matrix factorization: dot product of a user's and an item's embedding, plus item bias."""

    name: Literal["mf"] = "mf"
    embedding_dim: int = Field(64, ge=1)
    item_bias: bool = True
    normalize: bool = Field(False, description="Vectors of length one: the score is a cosine.")
    embedding_stddev: float = Field(0.1, gt=0, description="Of the tables' first values.")
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
    embedding_l2: float | None = Field(None, gt=0, description="On the rows of the batch.")
    temperature: float = Field(0.07, gt=0)
    objective: ObjectiveConfig = SampledSoftmaxConfig()


ModelConfig = Annotated[
    MFConfig | DSSMConfig, Field(discriminator="name"), _default_tag("name", "dssm")
]


class InputConfig(Finite):
    """How shards become batches."""

    batch_size: int = Field(256, ge=1, description="Global, over all replicas.")
    shuffle_buffer: int = Field(200_000, ge=1, description="Records.")
    interleave_shards: int = Field(4, ge=1)
    parallel_parses: int | None = Field(None, ge=1, description="None: chosen by tf.data.")


class OptimizerConfig(Finite):
    """Adam for dense weights, its lazy form (touched rows only) for embedding tables."""

    learning_rate: float = Field(1e-3, gt=0)
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-7, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    clip_norm: float | None = Field(None, gt=0)


class EarlyStoppingConfig(Finite):
    """Stops when the metric has not improved for `patience` epochs; the best epoch is kept."""

    metric: str = Field("ndcg@10", pattern=METRIC_PATTERN)
    patience: int = Field(3, ge=1)


class FitConfig(Finite):
    """How long to train."""

    epochs: int = Field(10, ge=1)
    early_stopping: EarlyStoppingConfig | None = EarlyStoppingConfig()
    log_every_seconds: float = Field(10.0, gt=0)
    steps_per_loop: int = Field(64, ge=1, description="Steps inside one compiled loop.")


class DevicesConfig(Finite):
    """All GPUs where there are any; else this many logical CPU devices."""

    cpu_replicas: int = Field(1, ge=1)


class EvaluationConfig(Finite):
    """Protocols; the full catalogue is always ranked."""

    ks: tuple[int, ...] = (1, 5, 10, 20, 50)
    mask_seen: bool = True
    sampled_negatives: int | None = Field(99, ge=1)
    batch_size: int = Field(1024, ge=1)

    @field_validator("ks")
    @classmethod
    def _sorted_positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if not ks or min(ks) < 1:
            raise ValueError("cut-offs must be 1 or more")
        return tuple(sorted(set(ks)))


class PredictConfig(Finite):
    """Ranked lists per user."""

    k: int = Field(20, ge=1)
    mask_seen: bool = True


class TrainConfig(Finite):
    """Everything that `sluice train` needs."""

    dataset: str = Field(description="Dataset directory, or one version's.")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the run.")
    root: str = "work/runs"
    seed: int = Field(42, ge=0, lt=2**31)
    model: ModelConfig = DSSMConfig()
    input: InputConfig = InputConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fit: FitConfig = FitConfig()
    devices: DevicesConfig = DevicesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    predict: PredictConfig = PredictConfig()

    def resolved(self) -> dict[str, Any]:
        """Returns the config as plain JSON values."""
        return self.model_dump(mode="json")
