"""Optimizers of dense weights and of embedding rows, and learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from conf.config_base import StrictFinite, default_tag


class ConstantSchedule(StrictFinite):
    """The configured rate throughout."""

    kind: Literal["constant"] = "constant"


class CosineSchedule(StrictFinite):
    """Falls along half a cosine to `final_share` of the rate, reached after its last step."""

    kind: Literal["cosine"] = "cosine"
    final_share: float = Field(
        0.0, ge=0, le=1, description="Share of the rate that is left after its last step."
    )


class LinearSchedule(StrictFinite):
    """Falls in a line to `final_share` of the rate, reached after its last step."""

    kind: Literal["linear"] = "linear"
    final_share: float = Field(
        0.0, ge=0, le=1, description="Share of the rate that is left after its last step."
    )


ScheduleConfig = Annotated[
    ConstantSchedule | CosineSchedule | LinearSchedule,
    Field(discriminator="kind"),
    default_tag("kind", "constant", alone=True),
]


class _SparseConfig(StrictFinite):
    learning_rate: float | None = Field(None, gt=0, description="None: the optimizer's.")


class SparseAdamConfig(_SparseConfig):
    """Lazy Adam: moments of rows that a batch does not touch do not decay."""

    kind: Literal["adam"] = "adam"


class SparseAdagradConfig(_SparseConfig):
    """Adagrad: a rate per number, which falls with the sum of its squared gradients."""

    kind: Literal["adagrad"] = "adagrad"
    initial_accumulator: float = Field(0.1, ge=0, description="First value of the sums.")


class SparseSGDConfig(_SparseConfig):
    """Plain gradient descent; it keeps no state."""

    kind: Literal["sgd"] = "sgd"


class SparseFTRLConfig(_SparseConfig):
    """FTRL-Proximal: L1 that makes exact zeros, on rows that are touched."""

    kind: Literal["ftrl"] = "ftrl"
    initial_accumulator: float = Field(0.1, gt=0, description="First value of the sums.")
    l1: float = Field(0.0, ge=0, description="Weight of the L1 norm.")
    l2: float = Field(0.0, ge=0, description="Weight of the squared L2 norm.")


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
    accumulate_steps: int | None = Field(
        None, ge=2, description="Parts that a batch is computed in, one after the other."
    )
