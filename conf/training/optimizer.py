"""Optimizers of dense weights and of embedding rows, and learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from conf.config_base import StrictFinite, default_tag


class ConstantSchedule(StrictFinite):
    """The configured rate throughout."""

    kind: Literal["constant"] = "constant"


_STEPS: int | None = Field(
    None,
    ge=1,
    description="Steps until the rate has fallen; None: those of the run. A run that ends before "
    "is a part of a longer one.",
)


class CosineSchedule(StrictFinite):
    """Falls along half a cosine to `final_share` of the rate, reached after its last step."""

    kind: Literal["cosine"] = "cosine"
    final_share: float = Field(
        0.0, ge=0, le=1, description="Share of the rate that is left after its last step."
    )
    steps: int | None = _STEPS


class PolynomialSchedule(StrictFinite):
    """Falls to `final_share` of the rate, reached after its last step, by a power of the rest."""

    kind: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0, description="1: linear.")
    final_share: float = Field(
        0.0, ge=0, le=1, description="Share of the rate that is left after its last step."
    )
    steps: int | None = _STEPS


class LinearSchedule(StrictFinite):
    """A polynomial schedule of power 1."""

    kind: Literal["linear"] = "linear"
    final_share: float = Field(
        0.0, ge=0, le=1, description="Share of the rate that is left after its last step."
    )
    steps: int | None = _STEPS


class ExponentialSchedule(StrictFinite):
    """Multiplied by `decay_rate` every `decay_steps`, smoothly or in stairs."""

    kind: Literal["exponential"] = "exponential"
    decay_rate: float = Field(gt=0, le=1, description="Factor.")
    decay_steps: int = Field(ge=1, description="Steps until the rate is multiplied once.")
    staircase: bool = Field(
        False, description="The rate falls at whole multiples of `decay_steps` alone."
    )


class InverseSqrtSchedule(StrictFinite):
    """Falls with the root of the step, from the end of the warm-up or from `flat_steps` on."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    flat_steps: int | None = Field(
        None, ge=1, description="Steps at the full rate, warm-up included; None: the warm-up alone."
    )


ScheduleConfig = Annotated[
    ConstantSchedule
    | CosineSchedule
    | LinearSchedule
    | PolynomialSchedule
    | ExponentialSchedule
    | InverseSqrtSchedule,
    Field(discriminator="kind"),
    default_tag("kind", "constant", alone=True),
]


class _SparseConfig(StrictFinite):
    learning_rate: float | None = Field(None, gt=0, description="None: the optimizer's.")


class SparseAdamConfig(_SparseConfig):
    """Lazy Adam: moments of rows that a batch does not touch do not decay."""

    kind: Literal["adam"] = "adam"
    beta_1: float | None = Field(None, ge=0, lt=1, description="None: the optimizer's.")
    beta_2: float | None = Field(None, ge=0, lt=1, description="None: the optimizer's.")
    epsilon: float | None = Field(None, gt=0, description="None: the optimizer's.")


class SparseAdagradConfig(_SparseConfig):
    """Adagrad: a rate per number, which falls with the sum of its squared gradients."""

    kind: Literal["adagrad"] = "adagrad"
    initial_accumulator: float = Field(0.1, ge=0, description="First value of the sums.")
    epsilon: float = Field(1e-7, gt=0, description="Added to the root, against division by zero.")


class SparseSGDConfig(_SparseConfig):
    """Plain gradient descent; it keeps no state."""

    kind: Literal["sgd"] = "sgd"


class SparseFTRLConfig(_SparseConfig):
    """FTRL-Proximal: L1 that makes exact zeros, on rows that are touched."""

    kind: Literal["ftrl"] = "ftrl"
    learning_rate_power: float = Field(
        -0.5, le=0, description="Power of the accumulator in the rate; -0.5: its root."
    )
    initial_accumulator: float = Field(0.1, gt=0, description="First value of the sums.")
    l1: float = Field(0.0, ge=0, description="Weight of the L1 norm.")
    l2: float = Field(0.0, ge=0, description="Weight of the squared L2 norm.")
    beta: float = Field(0.0, ge=0, description="Added to the root of the accumulator.")


SparseOptimizerConfig = Annotated[
    SparseAdamConfig | SparseAdagradConfig | SparseSGDConfig | SparseFTRLConfig,
    Field(discriminator="kind"),
    default_tag("kind", "adam"),
]


class DenseOptimizerConfig(StrictFinite):
    """Any Keras optimizer by name; further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field("adam", description="A class of keras.optimizers, in any case of letters.")
    learning_rate: float | None = Field(None, gt=0, description="None: the optimizer's.")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the Keras class, the learning rate aside."""
        return dict(self.model_extra or {})


class OptimizerConfig(StrictFinite):
    """Lazy rules (touched rows only) for embedding tables, a Keras optimizer for the rest."""

    learning_rate: float = Field(
        1e-3, gt=0, description="Rate of tables and dense weights, where theirs is not set."
    )
    beta_1: float = Field(0.9, ge=0, lt=1, description="Of Adam, on tables and dense weights.")
    beta_2: float = Field(0.999, ge=0, lt=1, description="Of Adam, on tables and dense weights.")
    epsilon: float = Field(1e-7, gt=0, description="Of Adam, on tables and dense weights.")
    sparse: SparseOptimizerConfig = Field(
        SparseAdamConfig(), description="Optimizer of embedding tables."
    )
    dense: DenseOptimizerConfig = DenseOptimizerConfig()
    schedule: ScheduleConfig = Field(
        ConstantSchedule(), description="How the rate changes over the steps."
    )
    warmup_steps: int | None = Field(
        None, ge=1, description="The rate rises in a line to the schedule's first value."
    )
    clip_norm: float | None = Field(None, gt=0, description="Of all gradients together.")
    clip_value: float | None = Field(None, gt=0, description="Of each number of a gradient.")
    accumulate_steps: int | None = Field(
        None, ge=2, description="Parts that a batch is computed in, one after the other."
    )

    @model_validator(mode="after")
    def _one_way_of_clipping(self) -> OptimizerConfig:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_norm and clip_value exclude each other: set one of them to null")
        return self
