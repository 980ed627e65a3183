"""Features and their encodings, as a config states them; `conf.encoders` is what they compute.

Ids follow the rule of the vocabularies: 0 pads, 1 stands for a missing value, values start at 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from conf.config_base import Name, Named, Strict
from conf.dates import Part, Period, TimeUnit
from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, VectorType, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import MAX_BUCKETS, NUMBERS, Operation
from conf.encoders.hashing import Cross, Hash
from conf.encoders.numbers import Bucketize, IsMissing, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams, TextUnit
from conf.schema import Role

_MAX_VECTOR = 65_536


class Encoding(Strict):
    """What is declared of each kind of encoding.

    Attributes:
        operation: The operation that executes it; None: it needs none.
        is_stated: Whether its keys are the operation's fields; else the operation is fitted.
        takes: Whether its column holds a value of each row, a list, or either.
        sets_length: Whether it says itself how long the feature is.
        further_columns_key: The key that names what it reads beside its feature's column.
    """

    if TYPE_CHECKING:
        kind: str
    operation: ClassVar[type[Operation] | None] = None
    is_stated: ClassVar[bool] = False
    takes: ClassVar[Literal["values", "lists", "either"]] = "either"
    sets_length: ClassVar[bool] = False
    further_columns_key: ClassVar[str | None] = None

    @property
    def accepts(self) -> tuple[str, ...]:
        """Types of raw values that its column may have; empty: any."""
        return () if self.operation is None else self.operation.accepts

    @property
    def further_columns(self) -> tuple[str, ...]:
        """Columns that it reads by name beside its feature's own."""
        named = getattr(self, self.further_columns_key) if self.further_columns_key else None
        return (named,) if isinstance(named, str) else named or ()

    @property
    def fits_numbers(self) -> bool:
        """Whether numbers are fitted for it on the train split; ids of tokens are none."""
        return False

    @property
    def loses_values(self) -> bool:
        """Whether values cannot be told from what a model reads, and what they become is fitted."""
        return self.fits_numbers

    def state(self) -> Operation | None:
        """Returns the operation, where it follows from the config; None: it is fitted."""
        if self.operation is None or not self.is_stated:
            return None
        given = {own.name: getattr(self, own.name) for own in fields(self.operation)}
        return self.operation(**{name: own for name, own in given.items() if own is not None})


class TokensConfig(Encoding):
    """The tokens of the train split that a vocabulary holds."""

    name: Name | None = Field(None, description="Vocabulary to share; None: one of its own.")
    min_count: int = Field(
        1, ge=1, description="Tokens with fewer occurrences in the train split are left out."
    )
    max_size: int | None = Field(None, ge=1, description="Most frequent tokens kept.")
    top_per_group: dict[str, Annotated[int, Field(ge=1)]] | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="A column of the event, and how many of the most frequent tokens of each of "
        "its values are kept, so that a small group is not crowded out.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="File of the tokens by rising id, in the place of those of the train "
        "split: text, one on each line, or Parquet with a column `token`.",
    )

    @model_validator(mode="after")
    def _path_gives_all_tokens(self) -> Self:
        limits = self.min_count > 1 or self.max_size or self.top_per_group
        if self.path is not None and (limits or getattr(self, "incremental", False)):
            raise ValueError(
                "`path` gives all tokens: leave `min_count`, `max_size`, `top_per_group` and "
                "`incremental` out"
            )
        return self


class VocabularyConfig(TokensConfig):
    """A vocabulary fitted on the train split: 0 pad, 1 OOV, then by falling frequency."""

    kind: Literal["vocabulary"] = "vocabulary"
    oov_buckets: int | None = Field(
        None, ge=1, le=MAX_BUCKETS, description="Ids that unknown tokens are hashed to."
    )
    incremental: bool = Field(
        False, description="Keep the ids of the previous version; append what is new."
    )
    expire_after_days: int | None = Field(
        None, ge=1, description="Retire tokens not seen for longer than this; incremental only."
    )

    @model_validator(mode="after")
    def _only_what_grows_expires(self) -> Self:
        if self.expire_after_days is not None and not self.incremental:
            raise ValueError("`expire_after_days` needs `incremental: true`")
        return self


class IdentityConfig(Encoding):
    """The value as it is, cast to the feature's type."""

    kind: Literal["identity"] = "identity"


class MultiHotConfig(TokensConfig):
    """A vector with 1.0 at each token that the row holds; for small vocabularies."""

    kind: Literal["multi_hot"] = "multi_hot"
    operation = MultiHot
    further_columns_key = "weights"
    sets_length = True
    weights: str | None = Field(
        None, description="Column of a weight for each value, in the place of 1.0; None: none."
    )

    @property
    def loses_values(self) -> bool:
        """Its tokens are no ids of the record."""
        return True


class LoggedConfig(Encoding):
    """Numbers that may be taken as logarithms."""

    log1p: bool = Field(
        False, description="sign(x) * log(1 + |x|) in place of x; normalize: before scaling."
    )


class StatisticConfig(TokensConfig):
    """A statistic of the train split per token."""

    operation = Statistic
    takes = "values"
    sets_length = True

    @property
    def fits_numbers(self) -> bool:
        """The statistics are."""
        return True


class TargetConfig(StatisticConfig):
    """Smoothed mean of the build's label per token, out of fold for train rows."""

    kind: Literal["target"] = "target"


class CountConfig(LoggedConfig, StatisticConfig):
    """Occurrences of a token in the train split."""

    kind: Literal["count"] = "count"


class MergedConfig(Encoding):
    """Several list columns as one feature."""

    further_columns_key = "merged_with"
    takes = "lists"
    merged_with: tuple[str, ...] = Field(
        (), description="Further list columns: index spaces one behind the other, or their weights."
    )


class SparseIndicesConfig(MergedConfig):
    """libfm indices, of one list column or of several with index spaces of their own."""

    kind: Literal["sparse_indices"] = "sparse_indices"
    operation = SparseIndices
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="Size of each index space; null: the highest of the train split, plus 1."
    )

    @model_validator(mode="after")
    def _a_size_for_each_column(self) -> Self:
        if self.sizes is not None and len(self.sizes) != 1 + len(self.merged_with):
            raise ValueError("`sizes` needs one entry per column: this one, then `merged_with`")
        return self

    @property
    def fits_numbers(self) -> bool:
        """Whether the sizes are fitted."""
        return self.sizes is None

    def state(self) -> Operation | None:
        """Returns the operation; None: its sizes are fitted."""
        return None if self.sizes is None else SparseIndices(self.sizes)


class OfListConfig(Encoding):
    """What is made of another list."""

    takes = "lists"
    of: str = Field(
        description="List feature whose ids are weighted, or whose values are counted (its "
        "`max_len` then holds too); these may be a list column's."
    )


class BagWeightsConfig(OfListConfig, MergedConfig):
    """Weights beside the ids of another feature, one for one."""

    kind: Literal["weights"] = "weights"
    operation = Weights
    is_stated = True
    scaled: bool = Field(False, description="Divide by the sum of the row's weights.")

    @property
    def accepts(self) -> tuple[str, ...]:
        """Numbers; the operation reads the ids that are weighted too, of any type."""
        return NUMBERS


class LengthConfig(OfListConfig):
    """Number of values of a list."""

    kind: Literal["length"] = "length"
    operation = Length


class VectorBytesConfig(Encoding):
    """A list of numbers as the bytes of their values, as numpy's `tobytes` writes them."""

    kind: Literal["vector_bytes"] = "vector_bytes"
    operation = VectorBytes
    is_stated = True
    takes = "lists"
    sets_length = True
    length: int = Field(ge=1, le=_MAX_VECTOR, description="Numbers that each list has.")
    dtype: VectorType = Field("float64", description="Type of the values, little-endian.")


class BucketizeConfig(Encoding):
    """Intervals between given boundaries: `(-inf, b0)`, `[b0, b1)`, …"""

    kind: Literal["bucketize"] = "bucketize"
    operation = Bucketize
    is_stated = True
    boundaries: tuple[float, ...] = Field(
        min_length=1, description="Rising boundaries between the intervals."
    )

    @model_validator(mode="after")
    def _boundaries_rise(self) -> Self:
        finite = all(abs(boundary) < float("inf") for boundary in self.boundaries)
        if not finite or list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("`boundaries` must be finite and rise")
        return self


class QuantileConfig(Encoding):
    """Intervals that hold equally many values of the train split."""

    kind: Literal["quantile"] = "quantile"
    operation = Bucketize
    buckets: int = Field(ge=2, le=10_000, description="Intervals.")

    @property
    def fits_numbers(self) -> bool:
        """The boundaries are."""
        return True


class NormalizeConfig(LoggedConfig):
    """Fill, clip, logarithm, scale: in this order, each where it is asked for."""

    kind: Literal["normalize"] = "normalize"
    operation = Normalize
    method: Literal["standard", "min_max", "robust"] | None = Field(
        "standard",
        description="(x - mean) / std (of the population: divided by n, not by n - 1), "
        "(x - min) / (max - min), (x - median) / IQR; null: none.",
    )
    constants: (
        tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(gt=0)]] | None
    ) = Field(
        None,
        description="[center, scale]: (x - center) / scale in the place of `method`; nothing is "
        "fitted.",
    )
    fill_missing: float | None = Field(None, description="Null: a missing value becomes 0.")
    clip: tuple[float | None, float | None] | None = Field(
        None, description="[least, greatest] raw value: others become these; null: no bound."
    )

    @model_validator(mode="before")
    @classmethod
    def _constants_are_the_method(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("constants") is None:
            return given
        if given.get("method") is not None:
            raise ValueError("`constants` are the scaling: leave `method` out")
        return {**given, "method": None}

    @property
    def fits_numbers(self) -> bool:
        """Whether the scaling is fitted."""
        return self.method is not None

    @property
    def preparation(self) -> Normalize:
        """All that is done before scaling."""
        least, greatest = self.clip or (None, None)
        return Normalize(self.fill_missing, least, greatest, self.log1p)

    def state(self) -> Operation | None:
        """Returns the operation; None: its scaling is fitted."""
        if self.method is not None:
            return None
        center, scale = self.constants or (0.0, 1.0)
        return replace(self.preparation, center=center, factor=1 / scale)


class IsMissingConfig(Encoding):
    """1.0 where the column has no value, else 0.0: beside an encoding that fills it in."""

    kind: Literal["is_missing"] = "is_missing"
    operation = IsMissing
    is_stated = True
    takes = "values"


class TimeConfig(Encoding):
    """How a time is read."""

    is_stated = True
    unit: TimeUnit | None = Field(
        None,
        description="Unit of the raw column; None: the column's own, ms where it is made.",
    )
    utc_offset_minutes: int = Field(
        0,
        ge=-24 * 60,
        le=24 * 60,
        description="Minutes east of UTC at which the day and hour are read.",
    )


class DatePartConfig(TimeConfig):
    """A part of the date, as an id."""

    kind: Literal["date_part"] = "date_part"
    operation = DatePart
    part: Part = Field(description="Which part of the date.")


class CyclicalConfig(TimeConfig):
    """Sine and cosine of the position in a period: two floats."""

    kind: Literal["cyclical"] = "cyclical"
    operation = Cyclical
    takes = "values"
    sets_length = True
    period: Period = Field(description="Period in which the position is taken.")


class BucketsConfig(Encoding):
    """What is hashed to a number of ids."""

    buckets: int = Field(ge=1, le=MAX_BUCKETS, description="Ids that values are hashed to.")


class HashConfig(BucketsConfig):
    """FarmHash buckets, equal to `tf.strings.to_hash_bucket_fast`; nothing is fitted."""

    kind: Literal["hash"] = "hash"
    operation = Hash
    is_stated = True


class HashKeyConfig(Encoding):
    """The whole 64-bit fingerprint as an id, for tables that grow by key."""

    kind: Literal["hash_key"] = "hash_key"
    operation = Hash

    def state(self) -> Operation:
        """Returns the operation."""
        return Hash(None)


class CrossConfig(BucketsConfig):
    """Hash of this column's value joined with those of others; of lists, each combination."""

    kind: Literal["cross"] = "cross"
    operation = Cross
    further_columns_key = "crossed_with"
    crossed_with: tuple[str, ...] = Field(
        min_length=1, description="Columns whose values are joined to this one's."
    )
    prepared: dict[
        str,
        Annotated[BucketizeConfig | QuantileConfig | DatePartConfig, Field(discriminator="kind")],
    ] = Field({}, description="By column: the buckets or part of the date that take its place.")

    @model_validator(mode="after")
    def _each_column_once(self) -> Self:
        if len(set(self.crossed_with)) < len(self.crossed_with):
            raise ValueError("`crossed_with` names a column twice")
        return self

    @property
    def fits_numbers(self) -> bool:
        """Whether a column is cut into equally full buckets."""
        return any(isinstance(part, QuantileConfig) for part in self.prepared.values())


class NgramsConfig(BucketsConfig):
    """Text to hashed runs of words or characters, ASCII letters in lower case."""

    kind: Literal["ngrams"] = "ngrams"
    operation = Ngrams
    takes = "values"
    unit: TextUnit = Field("word", description="What a run is made of.")
    sizes: tuple[Annotated[int, Field(ge=1, le=20)], ...] = Field(
        (1,), min_length=1, description="Lengths of the runs."
    )

    def state(self) -> Operation:
        """Returns the operation."""
        return Ngrams(self.unit, self.sizes, self.buckets)


EncodingConfig = Annotated[
    BucketizeConfig
    | CountConfig
    | CrossConfig
    | CyclicalConfig
    | DatePartConfig
    | HashConfig
    | HashKeyConfig
    | IdentityConfig
    | IsMissingConfig
    | LengthConfig
    | MultiHotConfig
    | NgramsConfig
    | NormalizeConfig
    | QuantileConfig
    | SparseIndicesConfig
    | TargetConfig
    | VectorBytesConfig
    | VocabularyConfig
    | BagWeightsConfig,
    Field(discriminator="kind"),
]


class FeatureConfig(Named):
    """One feature of the record: which column, which side of the model, which encoding."""

    column: str = Field(description="Column of the events that it is made of.")
    role: Role = Field(
        description="Which side of a model reads it; `id` is carried along and read by none."
    )
    encoding: EncodingConfig = Field(
        VocabularyConfig(), description="How the column's value becomes the feature's."
    )
    max_len: int | None = Field(None, ge=1, description="List features: values kept.")
    length: int | None = Field(None, ge=1, description="Lists of exactly this many values.")

    @model_validator(mode="after")
    def _one_length(self) -> FeatureConfig:
        if self.length is not None and self.max_len is not None:
            raise ValueError(f"feature {self.name!r} has both `length` and `max_len`")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads by name, its own first."""
        return (self.column, *self.encoding.further_columns)

    @property
    def vocabulary(self) -> str | None:
        """Name of the vocabulary that its tokens are looked up in, or None."""
        if isinstance(self.encoding, TokensConfig):
            return self.encoding.name or self.name
        return None

    @property
    def fitted_columns(self) -> tuple[str, ...]:
        """The columns that a model reads through what was fitted, so that values are lost."""
        is_read = self.role in ("user", "item", "context")
        return self.columns if is_read and self.encoding.loses_values else ()


def find_counted_lists(features: Any) -> Any:
    """Gives each feature of kind `length` the column and `max_len` of the list that it counts.

    Args:
        features: The features of a config as they are given, before they are checked.
    """
    if not isinstance(features, list | tuple):
        return features
    named = {
        feature["name"]: feature
        for feature in features
        if isinstance(feature, Mapping) and isinstance(feature.get("name"), str)
    }
    return [_find_counted_list(feature, named) for feature in features]


def _find_counted_list(feature: Any, named: Mapping[Any, Any]) -> Any:
    encoding = feature.get("encoding") if isinstance(feature, Mapping) else None
    if not isinstance(encoding, Mapping) or encoding.get("kind") != "length":
        return feature
    of = encoding.get("of")
    counted = named.get(of, {}) if isinstance(of, str) else {}
    found = {"column": counted.get("column", of), "max_len": counted.get("max_len")}
    return {**{name: value for name, value in found.items() if value is not None}, **feature}
