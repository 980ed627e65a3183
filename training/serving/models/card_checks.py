"""Whether a version that is to be served is what was exported, by its `export.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.export import ENCODED, EXPORT_FILE, find_damaged, is_sealed
from conf.errors import InputDataError

KIND_SIGNATURES = {"retrieval": "user_embedding", "ranking": ENCODED}
"""A signature that all models of a kind have, and those of no other."""


def check_files(version: Path, card: Mapping[str, Any]) -> None:
    """Refuses a version with a file that holds other bytes than were exported.

    Args:
        version: Its directory.
        card: What its `export.json` says.

    Raises:
        InputDataError: There is one, or `export.json` says another thing than was written.
    """
    damaged: str | None = f"{EXPORT_FILE}: what it says is not that of its fingerprint"
    if is_sealed(card):
        damaged = find_damaged(version, card["files"])
    if damaged is not None:
        raise InputDataError(
            f"version {version.name} of {version.parent.name} is not what was exported",
            received=damaged,
            fix="export the run again, or copy the version anew",
        )


def check_signatures(
    version: Path, card: Mapping[str, Any], held: Mapping[str, Mapping[str, tf.TensorSpec]]
) -> None:
    """Refuses a version whose `export.json` describes another model than the SavedModel is.

    Args:
        version: Its directory.
        card: What its `export.json` says.
        held: Inputs of the signatures of the SavedModel.

    Raises:
        InputDataError: It does.
    """
    said = {name: about["inputs"] for name, about in card["signatures"].items()}
    kinds = [kind for kind, name in KIND_SIGNATURES.items() if name in held]
    received = ""
    if kinds != [card["kind"]]:
        received = f"kind {card['kind']}, and signatures of {', '.join(kinds) or 'no kind'}"
    elif lone := sorted(said.keys() ^ held.keys()):
        received = f"signature {lone[0]} differs: one of them does not have it"
    elif wrong := [name for name in sorted(said) if _differ(said[name], held[name])]:
        received = f"signature {wrong[0]} differs: names, types or dimensions of its inputs"
    if received:
        raise InputDataError(
            f"{EXPORT_FILE} of version {version.name} of {version.parent.name} and the SavedModel "
            "beside it are not of one export",
            received=received,
            fix="export the run again",
        )


def _differ(said: list[dict[str, Any]], held: Mapping[str, tf.TensorSpec]) -> bool:
    inputs = {item["name"]: item for item in said}
    return inputs.keys() != held.keys() or not all(
        _fits(item, held[name]) for name, item in inputs.items()
    )


def _fits(item: Mapping[str, Any], spec: tf.TensorSpec) -> bool:
    """Whether an input has the type that is said of it, and as many dimensions."""
    dtype = "string" if item["dtype"] == "bytes" else item["dtype"]
    if "is_list" not in item:  # No feature: its dimensions are not said.
        return bool(spec.dtype.name == dtype)
    rank = 1 + item["is_list"] + (item.get("per") == "candidate")
    return bool(spec.dtype.name == dtype and spec.shape.rank == rank)
