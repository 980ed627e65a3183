"""The training input: how shards become batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from conf.config_base import StrictFinite

Op = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not_in"]
Scalar = int | float | str


class FilterConfig(StrictFinite):
    """Keeps the rows whose feature compares so with the value; of a list, its length."""

    feature: str = Field(description="Feature that is compared; of a list, its length.")
    op: Op = Field("==", description="The comparison.")
    value: Scalar | tuple[Scalar, ...] = Field(
        description="What it is compared with; a list of values for in and not_in."
    )

    @model_validator(mode="after")
    def _fits(self) -> FilterConfig:
        if isinstance(self.value, tuple) != (self.op in ("in", "not_in")):
            raise ValueError("op in and not_in take a list of values, every other op one value")
        return self


def describe_conditions(conditions: Iterable[Mapping[str, Any]]) -> str:
    """Says what rows must pass, given filters as JSON holds them."""
    return " and ".join(
        f"{item['feature']} {item['op']} {json.dumps(item['value'], ensure_ascii=False)}"
        for item in conditions
    )


ROWS_OF_TRIALS = ("input.validation", "input.filter")
"""Keys that decide which rows are held out for validation."""
# Cards of earlier runs name keys that are gone; they are off there.
_GONE = {"decoder": "block", **dict.fromkeys(("take", "cache", "cache_dir", "parallel_parses"))}


class HeldOutConfig(StrictFinite):
    """Rows of train that are held out: those whose key hashes into a share of all keys."""

    hash_of: str | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Scalar feature, or several; all rows of one value, or of one combination, "
        "stay together. The user alone holds whole users out, `[user, item]` some pairs of each."
    )
    share: float = Field(gt=0, lt=1, description="Share of all keys that is held out.")

    @property
    def key(self) -> tuple[str, ...]:
        """The features that are hashed together."""
        return (self.hash_of,) if isinstance(self.hash_of, str) else self.hash_of


class ClassBalanceConfig(StrictFinite):
    """Draws rows so that classes have given shares; the epoch keeps its number of rows."""

    feature: str = Field("label", description="Feature that holds the class.")
    shares: dict[int, float] = Field(min_length=2, description="Class: share of the rows.")

    @model_validator(mode="after")
    def _sum_to_one(self) -> ClassBalanceConfig:
        if min(self.shares.values()) < 0 or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError("shares must not be negative and must add up to 1")
        return self


class MixConfig(StrictFinite):
    """A further dataset whose train rows are mixed in."""

    dataset: str = Field(description="Dataset directory or URI, or one version's.")
    weight: float = Field(gt=0, lt=1, description="Share of each batch that it makes on average.")


OnCorrupt = Literal["fail", "skip_record", "skip_shard"]


class InputConfig(StrictFinite):
    """The training input: how shards become batches."""

    batch_size: int = Field(256, ge=1, description="Global, over all replicas.")
    shuffle_buffer: int = Field(
        200_000, ge=1, description="Rows that are decoded and shuffled at a time."
    )
    interleave_shards: int = Field(4, ge=1, description="Shards that rows are drawn from at once.")
    on_corrupt: OnCorrupt = Field(
        "fail",
        description="A damaged train shard ends training, or costs its damaged records, or "
        "the whole shard.",
    )
    filter: tuple[FilterConfig, ...] = ()
    validation: HeldOutConfig | None = None
    class_balance: ClassBalanceConfig | None = None
    mix: tuple[MixConfig, ...] = ()
    bucket_boundaries: tuple[int, ...] | None = Field(
        None, description="Batches of like length: lists are padded to the next boundary."
    )
    sparse: bool = Field(
        False, description="Ids that have weights beside them become a tf.SparseTensor."
    )

    @property
    def chooses_by(self) -> tuple[str, ...]:
        """Features whose values decide which rows are read, and for what."""
        held_out = () if self.validation is None else self.validation.key
        classes = () if self.class_balance is None else (self.class_balance.feature,)
        return tuple(dict.fromkeys((*(f.feature for f in self.filter), *held_out, *classes)))

    @property
    def is_exact(self) -> bool:
        """Whether the manifest's counts alone tell how many rows an epoch has."""
        return not self.filter and self.validation is None and self.on_corrupt == "fail"

    def tolerates(self, split: str, found_bytes: int | None, listed_bytes: int) -> bool:
        """Whether training goes on with a shard that is missing (None) or of another size.

        `skip_shard` leaves it out. `skip_record` trains on what is there of one that was cut.
        """
        if split != "train" or self.on_corrupt == "fail":
            return False
        if self.on_corrupt == "skip_shard":
            return True
        return found_bytes is not None and found_bytes < listed_bytes

    @property
    def mix_shares(self) -> tuple[float, ...]:
        """Share of a batch that each dataset makes on average, the dataset itself first."""
        others = tuple(part.weight for part in self.mix)
        return (1 - sum(others), *others)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_gone(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if (name, value) not in _GONE.items()}

    @model_validator(mode="after")
    def _fits(self) -> InputConfig:
        if sum(part.weight for part in self.mix) >= 1:
            raise ValueError("the weights of mix must leave a share for the dataset itself")
        edges = self.bucket_boundaries
        if edges is not None and (not edges or edges[0] < 1 or list(edges) != sorted(set(edges))):
            raise ValueError("bucket_boundaries must be rising lengths, 1 or more")
        if edges is not None and self.mix:
            raise ValueError("bucket_boundaries and mix exclude each other")
        return self
