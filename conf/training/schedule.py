"""Learning-rate schedules: what the configured rate is multiplied by, step after step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conf.training.base import Finite, kind_alone


class ConstantSchedule(Finite):
    """The configured rate throughout."""

    kind: Literal["constant"] = "constant"


class CosineSchedule(Finite):
    """Falls along half a cosine to `final_share` of the rate at the last step."""

    kind: Literal["cosine"] = "cosine"
    final_share: float = Field(0.0, ge=0, le=1)


class PolynomialSchedule(Finite):
    """Falls to `final_share` of the rate at the last step, by a power of what is left."""

    kind: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0, description="1: linear.")
    final_share: float = Field(0.0, ge=0, le=1)


class LinearSchedule(Finite):
    """A polynomial schedule of power 1."""

    kind: Literal["linear"] = "linear"
    final_share: float = Field(0.0, ge=0, le=1)


class ExponentialSchedule(Finite):
    """Multiplied by `decay_rate` every `decay_steps`, smoothly or in stairs."""

    kind: Literal["exponential"] = "exponential"
    decay_rate: float = Field(gt=0, le=1)
    decay_steps: int = Field(ge=1)
    staircase: bool = False


class InverseSqrtSchedule(Finite):
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
    kind_alone("constant"),
]
