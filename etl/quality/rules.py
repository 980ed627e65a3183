"""Results of a contract's rules: rates, ranges and volumes against what a rule allows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conf.errors import InputDataError
from conf.etl.contract import DomainRule, NullRateRule, RangeRule, RuleConfig, TypeRule, VolumeRule

logger = logging.getLogger("sluice.contract")


@dataclass(frozen=True)
class RuleResult:
    """One rule as checked.

    Attributes:
        rule: Kind and target, as `range ratings.rating`.
        severity: `error` or `warn`.
        passed: Whether it holds.
        received: What was found.
        allowed: What the rule allows.
        allowed_as: Key of `contract.allow` and the name there that lets it pass, of what no rule
            declares.
    """

    rule: str
    severity: str
    passed: bool
    received: str
    allowed: str
    allowed_as: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        data = asdict(self)
        del data["allowed_as"]
        return data


def settle_results(
    results: Iterable[RuleResult], hints: Sequence[str] = ()
) -> tuple[RuleResult, ...]:
    """Logs what is to be warned of, and refuses what is an error.

    Args:
        results: What was found.
        hints: What is known of the causes, for the refusal.

    Returns:
        The results, where no rule of severity `error` is violated.

    Raises:
        InputDataError: Names every violated rule of severity `error`.
    """
    settled = tuple(results)
    for result in settled:
        if not result.passed and result.severity == "warn":
            logger.warning(
                "data contract: %s: received %s; allowed %s",
                result.rule,
                result.received,
                result.allowed,
            )
    violated = [result for result in settled if not result.passed and result.severity == "error"]
    if violated:
        raise _refusal(violated, "".join(f"{hint}; " for hint in hints))
    return settled


def _refusal(violated: Sequence[RuleResult], hints: str) -> InputDataError:
    indent, count = "\n            ", len(violated)
    received = indent.join(f"{result.rule}: {result.received}" for result in violated)
    allowed = indent.join(f"{result.rule}: {result.allowed}" for result in violated)
    by_name = f"allow it by name: {_show_allowed(violated)}"
    if all(result.allowed_as is not None for result in violated):
        return InputDataError(
            f"the data look wrong in {count} way{'s' if count > 1 else ''}; nothing was published",
            received=received,
            allowed=allowed,
            fix=f"{hints}correct the input or the config, or {by_name}; the last version stays "
            "current",
        )
    is_mixed = any(result.allowed_as is not None for result in violated)
    return InputDataError(
        f"the data contract is violated ({count} rule{'s' if count > 1 else ''}); nothing was "
        "published",
        received=received,
        allowed=allowed,
        fix=f"{hints}correct the input, or change `contract.rules` (`severity: warn` lets a rule "
        f"pass); {f'{by_name}; ' if is_mixed else ''}the last version stays current",
    )


def _show_allowed(violated: Sequence[RuleResult]) -> str:
    """The part of a config that allows what was refused."""
    names: dict[str, dict[str, None]] = {}
    for key, name in (result.allowed_as for result in violated if result.allowed_as is not None):
        names.setdefault(key, {})[name] = None
    shown = ", ".join(f"{key}: [{', '.join(found)}]" for key, found in names.items())
    return f"`contract: {{allow: {{{shown}}}}}`"


def build_result(rule: RuleConfig, passed: bool, received: str, allowed: str) -> RuleResult:
    """Returns the result of a rule."""
    name = f"{rule.kind} {rule.target}"
    return RuleResult(name, rule.severity, passed, received, allowed)


def judge_rate(
    rule: RuleConfig, maximum: float, bad: int, total: int, what: str, allowed: str
) -> RuleResult:
    """Returns whether no more than a share of rows is bad; of no rows none is.

    Args:
        rule: The rule.
        maximum: The greatest share, in [0, 1].
        bad: Rows that violate it.
        total: Rows that could.
        what: What the bad ones are, after their count.
        allowed: What the others are.
    """
    rate = bad / total if total else 0.0
    received = f"{bad:,} of {total:,} ({rate:.4%}) {what}"
    bound = f"{allowed}" if maximum == 0 else f"{allowed}; at most {maximum:.4%} others"
    return build_result(rule, rate <= maximum, received, bound)


def describe_range(rule: RangeRule) -> str:
    """Returns the bounds as people write them."""
    low = "" if rule.minimum is None else f"from {rule.minimum:g}"
    high = "" if rule.maximum is None else f"to {rule.maximum:g}"
    return " ".join(part for part in (low, high) if part)


def describe_domain(rule: DomainRule) -> str:
    """Returns the allowed values, shortened where there are many."""
    shown = [repr(value) for value in rule.one_of[:10]]
    return ", ".join(shown) + (", …" if len(rule.one_of) > len(shown) else "")


def judge_nulls(rule: NullRateRule, nulls: int, rows: int) -> RuleResult:
    """Returns whether a column has few enough nulls."""
    rate = nulls / rows if rows else 0.0
    received = f"{nulls:,} of {rows:,} ({rate:.4%}) null"
    return build_result(rule, rate <= rule.maximum, received, f"at most {rule.maximum:.4%} null")


def judge_type(rule: TypeRule, found: str, refused: int, rows: int) -> RuleResult:
    """Returns whether a column has its type, and few enough values failed to parse as it."""
    if found != rule.type:
        return build_result(rule, False, found, rule.type)
    return judge_rate(rule, rule.max_rate, refused, rows, f"do not parse as {found}", rule.type)


def judge_volume(rule: VolumeRule, rows: int, previous: int | None) -> RuleResult:
    """Returns whether there are as many rows as there should be.

    Args:
        rule: The rule.
        rows: Rows that there are.
        previous: Rows that the current version has, or None where there is none.
    """
    passed = rule.min_rows is None or rows >= rule.min_rows
    passed &= rule.max_rows is None or rows <= rule.max_rows
    received, allowed = f"{rows:,} rows", []
    if rule.min_rows is not None:
        allowed.append(f"at least {rule.min_rows:,}")
    if rule.max_rows is not None:
        allowed.append(f"at most {rule.max_rows:,}")
    if rule.max_change_percent is not None:
        allowed.append(f"a change of at most {rule.max_change_percent:g} %")
        if previous is None:
            received += ", no version to compare with"
        else:
            change = _change_percent(rows, previous)
            received += f", {previous:,} before ({change:+.1f} %)"
            passed &= abs(change) <= rule.max_change_percent
    return build_result(rule, passed, received, ", ".join(allowed))


def _change_percent(rows: int, previous: int) -> float:
    if not previous:
        return 0.0 if not rows else float("inf")
    return 100.0 * (rows - previous) / previous


def shown(value: Any) -> str:
    """Returns a value for a message, shortened where it is long."""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
