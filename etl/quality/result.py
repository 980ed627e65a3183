"""What became of each rule of a contract."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conf.errors import InputDataError

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
    """

    rule: str
    severity: str
    passed: bool
    received: str
    allowed: str

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        return asdict(self)


def settle_results(results: Iterable[RuleResult]) -> tuple[RuleResult, ...]:
    """Logs what is to be warned of, and refuses what is an error.

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
        raise _refusal(violated)
    return settled


def _refusal(violated: Sequence[RuleResult]) -> InputDataError:
    indent = "\n            "
    return InputDataError(
        f"the data contract is violated ({len(violated)} rule"
        f"{'s' if len(violated) > 1 else ''}); nothing was published",
        received=indent.join(f"{result.rule}: {result.received}" for result in violated),
        allowed=indent.join(f"{result.rule}: {result.allowed}" for result in violated),
        fix="mend the input, or change `contract.rules` (`severity: warn` lets a rule pass); "
        "the last version stays current",
    )
