"""The data contract: what must hold of the sources and of the features, or nothing is published."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.config_base import Name, Strict
from conf.errors import ConfigError

ContractRate = Annotated[float, Field(ge=0, le=1)]


class ContractRule(Strict):
    """Base of all rules: `error` stops the publish, `warn` is logged and recorded."""

    severity: Literal["error", "warn"] = Field(
        "error", description="error: nothing is published. warn: logged and recorded."
    )


class SourceRule(ContractRule):
    """A rule on one column of a source, over the rows that parsed."""

    source: str = Field(description="Name of the source.")
    column: str = Field(description="Column of the source.")

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        return f"{self.source}.{self.column}"


class ContractValueRule(ContractRule):
    """A rule on one column of a source, or on one feature of a split."""

    source: str | None = Field(
        None, description="Name of a source; with `column`, in place of `feature`."
    )
    column: str | None = Field(None, description="Column of the source.")
    feature: Name | None = Field(None, description="Feature that is checked, in place of a column.")
    split: str = Field("train", description="Split whose feature is checked.")

    @model_validator(mode="after")
    def _one_target(self) -> ContractValueRule:
        of_source = self.source is not None and self.column is not None
        if of_source == (self.feature is not None) or (self.source is None) != (
            self.column is None
        ):
            raise ValueError("a rule needs either `source` and `column`, or `feature`")
        return self

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        if self.feature is not None:
            return f"feature {self.feature} ({self.split})"
        return f"{self.source}.{self.column}"


class TypeRule(ContractValueRule):
    """The declared type, and how many values of the source may fail to parse as it."""

    kind: Literal["type"]
    type: str = Field(description="Type that the column or feature must have.")
    max_rate: ContractRate = Field(
        0.0, description="Share of the source's values that may fail to parse."
    )


class RangeRule(ContractValueRule):
    """Least and greatest value; `max_rate` of the rows may lie outside (sources only)."""

    kind: Literal["range"]
    minimum: float | None = Field(None, description="Least value allowed; None: no bound.")
    maximum: float | None = Field(None, description="Greatest value allowed; None: no bound.")
    max_rate: ContractRate = Field(
        0.0, description="Share of the source's rows that may lie outside."
    )

    @model_validator(mode="after")
    def _bounded(self) -> RangeRule:
        if self.minimum is None and self.maximum is None:
            raise ValueError("a range needs `minimum` or `maximum`")
        if self.feature is not None and self.max_rate:
            raise ValueError("a feature's range has no `max_rate`: its extremes are compared")
        return self


class DomainRule(ContractValueRule):
    """The allowed values; `max_rate` of the values that are there may be others."""

    kind: Literal["domain"]
    one_of: tuple[int | float | str, ...] = Field(
        min_length=1, description="The values that are allowed."
    )
    max_rate: ContractRate = Field(0.0, description="Share of values that may be others.")


class NullRateRule(ContractValueRule):
    """The greatest share of nulls, of a feature those of its raw column. Of ids made by a
    vocabulary, OOV counts as null.
    """

    kind: Literal["null_rate"]
    maximum: ContractRate = Field(description="Greatest share of nulls.")


class UniqueRule(ContractRule):
    """No two rows of a source agree in these columns; rows with a null among them are free."""

    kind: Literal["unique"]
    source: str = Field(description="Name of the source.")
    columns: tuple[str, ...] = Field(
        min_length=1, description="Columns that together must not repeat."
    )
    max_rate: ContractRate = Field(0.0, description="Share of rows that may repeat another.")

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        return f"{self.source}.{'+'.join(self.columns)}"


class ReferencesRule(SourceRule):
    """Each value of a column stands among the keys of a dictionary; null is free."""

    kind: Literal["references"]
    dictionary: str = Field(description="Source whose key the values must be among.")
    max_rate: ContractRate = Field(0.0, description="Share of rows that may have no entry.")


class VolumeRule(ContractRule):
    """Rows of a source (those that parsed), or of a written split."""

    kind: Literal["volume"]
    source: str | None = Field(
        None, description="Source whose rows are counted; in place of `split`."
    )
    split: str | None = Field(
        None, description="Split whose records are counted; in place of `source`."
    )
    min_rows: int | None = Field(None, ge=0, description="Fewest rows allowed; None: no bound.")
    max_rows: int | None = Field(None, ge=0, description="Most rows allowed; None: no bound.")
    max_change_percent: float | None = Field(
        None, ge=0, description="Change against the current version, up or down."
    )

    @model_validator(mode="after")
    def _complete(self) -> VolumeRule:
        if (self.source is None) == (self.split is None):
            raise ValueError("a volume rule needs either `source` or `split`")
        if (self.min_rows, self.max_rows, self.max_change_percent) == (None, None, None):
            raise ValueError("a volume rule needs min_rows, max_rows or max_change_percent")
        return self

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        return str(self.source) if self.source is not None else f"split {self.split}"


class FreshnessRule(SourceRule):
    """The latest time of a column against the end of the run's declared day (UTC).

    The day is that of the run (`--date`), or `date`; the wall clock only where `clock` says so.
    """

    kind: Literal["freshness"]
    max_age_hours: float = Field(
        ge=0, description="Hours that the latest time may lie before the end of the day."
    )
    max_ahead_hours: float = Field(0.0, ge=0, description="Later times are from the future.")
    clock: Literal["run", "wall"] = Field(
        "run", description="run: ages count from the end of the run's day. wall: from now."
    )
    date: datetime.date | None = Field(
        None, description="Day that ages count from; None: the run's."
    )

    def find_day(self, run_date: datetime.date | None) -> datetime.date | None:
        """Returns the day at whose end ages are counted; None: now.

        Args:
            run_date: Last day of the run, or None where the run has no days.

        Raises:
            ConfigError: Neither the run nor the rule names a day, and the clock is not asked for.
        """
        if self.clock == "wall":
            return None
        day = self.date or run_date
        if day is None:
            raise ConfigError(
                f"contract rule freshness {self.target} has no day to compare with",
                received="neither the run nor the rule has a date",
                allowed="a run by date, `date: YYYY-MM-DD` in the rule, or `clock: wall`",
                fix="run with --date, or set the rule's `date` or `clock`",
            )
        return day


class DriftRule(ContractRule):
    """Largest distance of a feature's distribution from that of the current version.

    `psi`: population stability index; `js`: Jensen-Shannon divergence (base 2, 0 to 1);
    `ks`: Kolmogorov-Smirnov distance, for numbers only.
    """

    kind: Literal["drift"]
    feature: Name = Field(description="Feature whose distribution is compared.")
    split: str = Field("train", description="Split that is compared.")
    metric: Literal["psi", "js", "ks"] = Field("psi", description="Which distance: see above.")
    maximum: float = Field(0.2, gt=0, description="Greatest distance allowed.")

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        return f"feature {self.feature} ({self.split}, {self.metric})"


RuleConfig = Annotated[
    TypeRule
    | RangeRule
    | DomainRule
    | NullRateRule
    | UniqueRule
    | ReferencesRule
    | VolumeRule
    | FreshnessRule
    | DriftRule,
    Field(discriminator="kind"),
]


class LeakageConfig(Strict):
    """The correlation from which a feature that a model reads counts as a leak of the label."""

    maximum: float = Field(
        0.98, gt=0, le=1, description="Of |correlation| and of the correlation ratio."
    )
    min_rows: int = Field(
        100, ge=2, description="Features with fewer rows that have a value are not checked."
    )
    severity: Literal["error", "warn"] = Field(
        "warn", description="error: nothing is published. warn: logged and recorded."
    )


class AllowedConfig(Strict):
    """What a build refuses as a likely mistake, and lets pass where it is named here."""

    unmatched: tuple[str, ...] = Field(
        (), description="Sources that may match no event: dictionaries, and conversions of labels."
    )
    empty_vocabulary: tuple[str, ...] = Field(
        (), description="Vocabularies that may hold no token."
    )
    constant: tuple[Name, ...] = Field(
        (), description="Features that may be the same in every row of the train split."
    )
    one_class: tuple[Name, ...] = Field(
        (), description="Labels that may be the same in every row of the train split."
    )


class ContractConfig(Strict):
    """The data contract of a build."""

    rules: tuple[RuleConfig, ...] = Field((), description="The rules, each of a `kind`.")
    leakage: LeakageConfig | None = LeakageConfig()
    allow: AllowedConfig = AllowedConfig()
    slices: tuple[Name, ...] = Field(
        (), description="Scalar features whose label rate is kept by value."
    )

    @property
    def sources(self) -> set[str]:
        """Names of the sources that the rules are about."""
        named = {rule.source for rule in self.rules if not isinstance(rule, DriftRule)}
        named |= {rule.dictionary for rule in self.rules if isinstance(rule, ReferencesRule)}
        return {name for name in named if name is not None}
