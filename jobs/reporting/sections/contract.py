"""The rules of the data contract, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.manifest import Manifest
from jobs.reporting.blocks import Cell, Column, Note, Section, build_table

if TYPE_CHECKING:
    from jobs.reporting.sections.changes import DatasetData


def count_violated(manifest: Manifest) -> int:
    """Returns how many rules are violated."""
    return sum(not rule.get("passed") for rule in manifest.contract)


def build_contract(data: DatasetData) -> Section:
    """A table of the rules, violated ones first."""
    lead = "What was declared of sources and features, checked before the version was published."
    rules = data.manifest.contract
    if not rules:
        note = Note("No rule is declared; `contract.rules` of the build's config does that.")
        return Section("contract", "Data contract", lead, (note,))
    columns = [Column(title, numeric=False) for title in
               ("Rule", "Outcome", "Severity", "Received", "Allowed")]  # fmt: skip
    rows: list[list[Cell | str]] = [
        [
            str(rule["rule"]),
            Cell("holds" if rule["passed"] else "violated", best=not rule["passed"]),
            str(rule["severity"]),
            str(rule["received"]),
            str(rule["allowed"]),
        ]
        for rule in sorted(rules, key=lambda rule: bool(rule["passed"]))
    ]
    table = build_table("Rules, violated ones first.", columns, rows)
    return Section("contract", "Data contract", lead, (table,))
