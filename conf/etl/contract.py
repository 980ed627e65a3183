"""The data contract: what must hold of the sources and of the features, or nothing is published."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from conf.config_base import Name, Strict
from conf.errors import ConfigError, did_you_mean
from conf.etl.references import EVALUATION_FEATURES, check_key, source_columns
from conf.etl.sources import NUMBER_TYPES
from conf.splits import ALL_SPLITS

if TYPE_CHECKING:
    from conf.etl.build import BuildConfig

RuleKind = Literal[
    "type",
    "range",
    "domain",
    "null_rate",
    "unique",
    "references",
    "volume",
    "freshness",
    "drift",
]
Severity = Literal["error", "warn"]
_VALUES = ({"source", "column"}, {"feature", "split"})
_COLUMN = ({"source", "column"},)
# By kind: the keys that may name what is checked, those that it reads, those of which it needs one.
_PLACES: dict[str, tuple[set[str], ...]] = {
    **dict.fromkeys(("type", "range", "domain", "null_rate"), _VALUES),
    **dict.fromkeys(("unique", "references", "freshness"), _COLUMN),
    "volume": ({"source"}, {"split"}),
    "drift": ({"feature", "split"},),
}
_READ = {
    "type": ("type", "max_rate"),
    "range": ("minimum", "maximum", "max_rate"),
    "domain": ("one_of", "max_rate"),
    "null_rate": ("max_rate",),
    "unique": ("max_rate",),
    "references": ("dictionary", "max_rate"),
    "volume": ("minimum", "maximum", "max_change_percent"),
    "freshness": ("minimum", "maximum", "date"),
    "drift": ("metric", "maximum"),
}
_NEEDED = {
    "type": ("type",),
    "range": ("minimum", "maximum"),
    "domain": ("one_of",),
    "references": ("dictionary",),
    "volume": ("minimum", "maximum", "max_change_percent"),
    "freshness": ("maximum",),
}
_MOST_DRIFT = 0.2


class RuleConfig(Strict):
    """What must hold of a column, a feature, a source or a split.

    `type`: the declared type. `range`: `minimum` to `maximum`. `domain`: `one_of`. `null_rate`: the
    share of nulls, of a feature those of its raw column; of a vocabulary's ids unknown tokens count
    too. `unique`: no two rows agree in `column`, one or several; rows with a null there are free.
    `references`: values are keys of `dictionary`. `volume`: number of rows. `freshness`: age of the
    latest time in hours, counted from the end of the day `date` (UTC); below `minimum`, or 0, it is
    the future. `drift`: distance of a feature from the current version.
    """

    kind: RuleKind = Field(description="What is asked: see above.")
    severity: Severity = Field(
        "error", description="error: nothing is published. warn: logged and recorded."
    )
    source: str | None = Field(None, description="Source that is checked, of the rows that parsed.")
    column: str | tuple[str, ...] | None = Field(
        None, description="Column of the source; unique: one or several."
    )
    feature: Name | None = Field(None, description="Feature that is checked, in place of a column.")
    split: str | None = Field(
        None, description="Split of the feature, or whose records are counted; None: train."
    )
    minimum: float | None = Field(None, description="Least value, rows or hours; None: no bound.")
    maximum: float | None = Field(
        None, description="Greatest value, rows, hours or distance; drift: 0.2 where left out."
    )
    max_rate: float = Field(
        0.0, ge=0, le=1, description="Share that may be otherwise; null_rate: that may be null."
    )
    type: str | None = Field(None, description="type: that of the column or feature.")
    one_of: tuple[int | float | str, ...] | None = Field(
        None, min_length=1, description="domain: the values that are allowed."
    )
    dictionary: str | None = Field(
        None, description="references: source whose key the values must be among."
    )
    max_change_percent: float | None = Field(
        None, ge=0, description="volume: change against the current version, up or down."
    )
    date: datetime.date | Literal["run_date", "now"] = Field(
        "run_date", description="freshness: day that ages count from, or the moment of the run."
    )
    metric: Literal["psi", "js", "ks"] = Field(
        "psi",
        description="drift: population stability index, Jensen-Shannon divergence (base 2, 0 to "
        "1), or Kolmogorov-Smirnov distance (of numbers only).",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        split = {"split": "train"} if data.get("feature") and not data.get("split") else {}
        most = {"maximum": _MOST_DRIFT} if data.get("kind") == "drift" else {}
        return {**most, **data, **split}

    @model_validator(mode="after")
    def _complete(self) -> RuleConfig:
        named = {"source", "column", "feature", "split"}
        given = {name for name in type(self).model_fields if self._is_given(name)}
        if given & named not in _PLACES[self.kind]:
            ways = " or ".join(" and ".join(f"`{n}`" for n in sorted(w)) for w in self._places)
            raise ValueError(f"a rule of kind {self.kind} needs {ways}, and nothing else of these")
        if unread := given - named - {"kind", "severity", *_READ[self.kind]}:
            raise ValueError(f"a rule of kind {self.kind} does not read {', '.join(unread)}")
        needed = _NEEDED.get(self.kind, ())
        if needed and given.isdisjoint(needed):
            raise ValueError(f"a rule of kind {self.kind} needs {' or '.join(needed)}")
        if self.kind == "range" and self.feature is not None and self.max_rate:
            raise ValueError("a feature's range has no `max_rate`: its extremes are compared")
        if self.kind != "unique" and isinstance(self.column, tuple):
            raise ValueError(f"a rule of kind {self.kind} is about one `column`")
        return self

    @property
    def _places(self) -> tuple[set[str], ...]:
        return _PLACES[self.kind]

    def _is_given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are checked."""
        return (self.column,) if isinstance(self.column, str) else self.column or ()

    @property
    def target(self) -> str:
        """Name of the checked column, feature or split in messages."""
        if self.kind == "drift":
            return f"feature {self.feature} ({self.split}, {self.metric})"
        if self.feature is not None:
            return f"feature {self.feature} ({self.split})"
        if self.split is not None:
            return f"split {self.split}"
        return ".".join(filter(None, (self.source, "+".join(self.columns))))

    def find_day(self, run_date: datetime.date | None) -> datetime.date | None:
        """Returns the day at whose end ages are counted; None: now.

        Args:
            run_date: Last day of the run, or None where the run has no days.

        Raises:
            ConfigError: Neither the run nor the rule names a day.
        """
        if self.date == "now":
            return None
        day = run_date if self.date == "run_date" else self.date
        if day is None:
            raise ConfigError(
                f"contract rule freshness {self.target} has no day to compare with",
                received="neither the run nor the rule has a date",
                allowed="a run by date, or the rule's `date`: YYYY-MM-DD or now",
                fix="run with --date, or set the rule's `date`",
            )
        return day


class ContractConfig(Strict):
    """The data contract of a build."""

    rules: tuple[RuleConfig, ...] = Field((), description="What must hold.")
    leakage: Severity | None = Field(
        "warn",
        description="What follows where a feature that a model reads has a correlation (or "
        "correlation ratio) of more than 0.98 with the label. None: it is not looked at.",
    )
    allow: tuple[str, ...] = Field(
        (),
        description="What a build refuses as a likely mistake, and lets pass by name: sources that "
        "may match no event, vocabularies that may hold no token, features and labels that may be "
        "the same in every row of the train split.",
    )
    slices: tuple[Name, ...] = Field(
        (), description="Scalar features whose label rate is kept by value."
    )

    @property
    def sources(self) -> set[str]:
        """Names of the sources that the rules are about."""
        named = {name for rule in self.rules for name in (rule.source, rule.dictionary)}
        return {name for name in named if name is not None}


def check_contract_references(config: BuildConfig) -> None:
    """Checks every source, column, feature and split that the contract names.

    Raises:
        ValueError: One is not declared, or cannot play the part it is given.
    """
    _check_allowed(config)
    features = {feature.name for feature in config.features} | set(EVALUATION_FEATURES)
    features |= {label.name for label in config.all_labels}
    for name in config.contract.slices:
        _require("contract.slices", "feature", name, features)
    if config.contract.slices and config.first_label is None:
        raise ValueError("contract.slices: there is no label whose rate could be kept by slice")
    for index, rule in enumerate(config.contract.rules):
        _check_rule(config, f"contract.rules[{index}] ({rule.kind})", rule, features)


def _check_allowed(config: BuildConfig) -> None:
    labels, features = config.all_labels, config.features
    known = {join.source for join in config.joins}
    known |= {label.conversion.source for label in labels if label.conversion is not None}
    known |= {label.name for label in labels} | {feature.name for feature in features}
    known |= {feature.vocabulary for feature in features if feature.vocabulary is not None}
    for name in config.contract.allow:
        _require("contract.allow", "joined source, vocabulary, feature or label", name, known)


def _require(where: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: no such {what}: {name!r}; {did_you_mean(name, known)}")


def _check_rule(config: BuildConfig, where: str, rule: RuleConfig, features: set[str]) -> None:
    if rule.split is not None:
        _require(where, "split", rule.split, ALL_SPLITS)
    if rule.feature is not None:
        _require(where, "feature", rule.feature, features)
        _check_rule_feature(config, where, rule)
    if rule.source is None:
        return
    _require(where, "source", rule.source, config.sources)
    columns = source_columns(config, rule.source)
    if rule.dictionary is not None:
        _require(where, "dictionary", rule.dictionary, config.sources)
        check_key(config, where, columns, rule.columns[0], rule.dictionary)
    for column in rule.columns:
        _check_rule_column(where, rule, column, columns.require(where, column))


def _check_rule_column(where: str, rule: RuleConfig, column: str, kind: str) -> None:
    element = kind.removeprefix("list<").removesuffix(">")
    if rule.kind == "type" and rule.type != kind:
        raise ValueError(f"{where}: column {column!r} is declared as {kind}, not {rule.type}")
    if rule.kind in ("range", "freshness") and element not in NUMBER_TYPES:
        raise ValueError(f"{where}: column {column!r} is {kind}, not a number")
    # Beside a number Spark would take text for one: "01" would be 1.
    others = [v for v in rule.one_of or () if isinstance(v, str) != (element == "string")]
    if others:
        raise ValueError(f"{where}: column {column!r} is {kind}; one_of holds {others[0]!r}")
    if rule.kind in ("unique", "references", "freshness") and kind != element:
        raise ValueError(f"{where}: column {column!r} is a list")


def _check_rule_feature(config: BuildConfig, where: str, rule: RuleConfig) -> None:
    ids = {f.name for f in config.features if f.encoding.kind == "vocabulary"}
    by_order = rule.kind == "range" or (rule.kind == "drift" and rule.metric == "ks")
    if rule.feature in ids and by_order:
        raise ValueError(
            f"{where}: feature {rule.feature!r} holds ids of a vocabulary, which have no order; "
            "use domain, null_rate, or drift by psi or js"
        )
