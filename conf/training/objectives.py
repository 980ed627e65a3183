"""Objectives: what a model learns, the loss of it, and the negatives of retrieval."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from conf.config_base import OWN_CODE_PATTERN, StrictFinite, default_tag

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

    @property
    def has_batch(self) -> bool:
        """Whether the items of the batch's rows are among them."""
        return self.source in ("batch", "mixed")


class DrawnNegativesConfig(NegativesConfig):
    """As `NegativesConfig`, for losses that compare each row with items drawn for it alone."""

    source: Literal["uniform", "frequency", "adaptive"] = Field(
        "uniform",
        description="How they are drawn: all items alike, by their rows in train, or by what "
        "training has met.",
    )
    count: int = Field(1, ge=1, description="Items drawn for each row.")


class OwnLossConfig(StrictFinite):
    """User code in the place of the formula: a value for each row, in TensorFlow."""

    function: str = Field(
        pattern=OWN_CODE_PATTERN,
        description="`package.module:function`. From a label: `(labels, logits)`, "
        "else `(positives, negatives, counted)`.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the function."
    )


OwnLoss = Annotated[
    OwnLossConfig | None,
    Field(description="User code in the place of the built-in formula."),
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
