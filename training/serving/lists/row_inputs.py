"""Inputs of a row: what a request says of the user, and what is stored where it says nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conf.artefacts.export import FEATURE_PREFIX, RANK_ITEMS, ROW_FEATURES
from training.encoders.vocabularies import read_whole_key
from training.index.item_columns import Token
from training.index.known_entities import KnownEntities
from training.raw_inputs.inputs import SourceNames
from training.raw_inputs.requests import (
    build_array,
    build_inputs,
    once_per_object,
    read_column,
    read_list,
    read_names,
)
from training.serving.models.served_version import ServedVersion
from training.serving.requests.errors import RequestError, refuse_values
from training.serving.requests.limits import RequestLimits
from training.serving.requests.recommend_request import RecommendRequest
from training.serving.requests.tensors import Arrays

ROW_SIGNATURES = {"retrieval": "user_embedding", "ranking": RANK_ITEMS}
"""Signature that takes raw values of a row, by the kind of the model."""


@dataclass(frozen=True)
class RowInputs:
    """Inputs of a signature that are features of the row.

    Attributes:
        items: What `export.json` says of each.
    """

    items: Sequence[Mapping[str, Any]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(item["name"] for item in self.items)

    @cached_property
    def sources(self) -> SourceNames:
        """Columns that stand for the inputs."""
        return read_names(self.items)

    @cached_property
    def allowed(self) -> frozenset[str]:
        """Names that a request may use: those of the inputs, and of the source's columns."""
        return frozenset({*self.names, *self.sources.sources.values()})


@once_per_object
def _find_rows(inputs: Sequence[Mapping[str, Any]]) -> RowInputs:
    return RowInputs([item for item in inputs if "means" not in item])


def find_user_key(version: ServedVersion) -> str | None:
    """Returns the feature of the user's id; None: the dataset has none."""
    card = version.card
    found: str | None = (card["users"] or {}).get("key", card.get("user"))
    return found


def find_row_inputs(version: ServedVersion, signature: str) -> RowInputs:
    """Returns the inputs of a signature that are features of the row."""
    return _find_rows(_list_inputs(version, signature))


def find_items_input(version: ServedVersion, signature: str) -> tuple[str, Any]:
    """Returns name and specification of the input that takes keys of items."""
    name = next(item["name"] for item in _list_inputs(version, signature) if "means" in item)
    return name, version.find_specs(signature)[name]


def _list_inputs(version: ServedVersion, signature: str) -> Sequence[Mapping[str, Any]]:
    inputs: Sequence[Mapping[str, Any]] = version.card["signatures"][signature]["inputs"]
    return inputs


def describe_input(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a person must know to give a value."""
    return {
        "name": item["name"],
        "column": item["column"],
        "type": item["dtype"],
        "is_list": item["is_list"],
        "is_required": _is_required(item),
        "is_time": read_column(item).read_unit is not None,
    }


def _is_required(item: Mapping[str, Any]) -> bool:
    """Whether a row must have a value; a list may be missing: it is empty then."""
    return bool(item.get("is_required")) and not item["is_list"]


def check_features(request: RecommendRequest, models: Sequence[ServedVersion]) -> None:
    """Refuses features that no model reads.

    Raises:
        RequestError: There is one, the request names the user among them, or says nothing of one.
    """
    if request.user is None and not request.features:
        raise RequestError("a request needs 'user', 'features', or both")
    rows = [find_row_inputs(model, ROW_SIGNATURES[model.card["kind"]]) for model in models]
    for model, row in zip(models, rows, strict=True):
        _refuse_key(request, row, find_user_key(model))
    names = frozenset().union(*(row.allowed for row in rows))
    if (unknown := next((name for name in request.features if name not in names), None)) is None:
        return
    raise RequestError(f"unknown features {[unknown[:100]]}; allowed: {', '.join(sorted(names))}")


def _refuse_key(request: RecommendRequest, row: RowInputs, key: str | None) -> None:
    """Refuses a user's key as a feature: nothing that is stored of the user would be used."""
    keys = {item["name"] for item in row.items if item["feature"] == key}
    keys |= {column for name, column in row.sources.sources.items() if name in keys}
    if named := next((name for name in request.features if name in keys), None):
        raise RequestError(
            f"features: {named[:100]} names the user, which 'user' does: leave it out"
        )


def find_stored(
    version: ServedVersion,
    signature: str,
    known: KnownEntities,
    request: RecommendRequest,
    row: int | None,
) -> frozenset[str]:
    """Returns the features that are taken from what is stored of a user: all that are not given.

    Raises:
        RequestError: A list is given, and not one that stands beside it; or a part of what a stored
            feature is made of.
    """
    if row is None or known.users is None:
        return frozenset()
    inputs = find_row_inputs(version, signature)
    given = inputs.sources.find_given(request.features)
    read = {item["feature"] for item in inputs.items}
    said = {item["feature"] for item in inputs.items if item["name"] in given}
    users = version.card["users"] or {}
    stored = set(users.get("features", ()))
    _refuse_parts(inputs, given, said & stored)
    for group in users.get("aligned", ()):  # Exports of earlier releases say nothing of them.
        there, missing = said.intersection(group), read.intersection(group) - said
        if there and missing:
            raise RequestError(
                f"features: {', '.join(sorted(there))} came without {', '.join(sorted(missing))}, "
                "which stands beside it value for value: give both, or neither"
            )
    return frozenset(read & stored - said)


def _refuse_parts(inputs: RowInputs, given: Collection[str], features: Collection[str]) -> None:
    """Refuses some of the columns that a stored feature is made of: the others are not stored."""
    for feature in features:
        columns = [item["column"] for item in inputs.items if item["feature"] == feature]
        said = [item["column"] for item in inputs.items
                if item["feature"] == feature and item["name"] in given]  # fmt: skip
        if len(said) < len(columns):
            raise RequestError(
                f"features: {feature} is made of {', '.join(columns)}; received "
                f"{', '.join(said)}: give all of them, or none"
            )


@refuse_values()
def read_given(
    version: ServedVersion, request: RecommendRequest, histories: Collection[str]
) -> dict[str, list[Token]]:
    """Returns the keys of items that a request gives as the user's histories, by feature.

    Raises:
        RequestError: Text is no list as the build reads it, or holds too many values.
    """
    row = find_row_inputs(version, ROW_SIGNATURES[version.card["kind"]])
    given = row.sources.find_given(request.features)
    return {
        item["feature"]: read_list(
            item["name"], request.features, row.sources, RequestLimits.values
        )
        for item in row.items
        if item["feature"] in histories and item["name"] in given
    }


def require_row_features(version: ServedVersion, names: Sequence[str]) -> None:
    """Checks that a model can encode what a request says beside what is stored.

    Raises:
        RequestError: It cannot.
    """
    if ROW_FEATURES not in version.signatures:
        raise RequestError(
            f"{version.name} reads {', '.join(names)} of the request beside what is stored of the "
            "user, which an export of an earlier release cannot: export the run again"
        )


@refuse_values()
def read_encoded(
    version: ServedVersion, signature: str, known: KnownEntities, row: int, stored: Collection[str]
) -> Arrays:
    """Returns what is stored of a user."""
    if known.users is None:
        raise RequestError("the export holds no users")
    specs, inputs = version.find_specs(signature), {}
    user = known.users.table.slice(row, 1)
    for item in find_row_inputs(version, signature).items:
        if item["feature"] in stored:
            value = user[f"{FEATURE_PREFIX}{item['feature']}"].to_pylist()
            inputs[item["name"]] = build_array(item["name"], value, specs[item["name"]])
    return inputs


@refuse_values()
def read_raw(
    version: ServedVersion,
    signature: str,
    request: RecommendRequest,
    stored: Collection[str],
    most: int,
) -> Arrays:
    """Returns one row of raw values; what the request leaves out is missing.

    What is stored must not be there: its place is filled, as a signature takes all of its inputs.

    Args:
        version: What is called.
        signature: Of the version.
        request: What is said of the user.
        stored: Features that come from what is stored.
        most: Values that a list of text may have.

    Raises:
        RequestError: A value is not of its type, or must be there and is not.
    """
    key, features = find_user_key(version), request.features
    about = find_row_inputs(version, signature)
    specs, inputs = version.find_specs(signature), {}
    given = {name: [value] for name, value in features.items()}
    for item in about.items:
        name = item["name"]
        if any(features.get(other) is not None for other in about.sources.list_names(name)):
            continue
        if item["feature"] in stored and _is_required(item):
            filler = "" if item["dtype"] == "string" else 0
            inputs[name] = build_array(name, [filler], specs[name])  # No time, no entry: not read.
        else:
            given[name] = [_read_key(request.user, item) if item["feature"] == key else None]
    rest = {name: specs[name] for name in about.names if name not in inputs}
    return {**inputs, **build_inputs(given, rest, about.sources, most)}


def _read_key(user: Token | None, item: Mapping[str, Any]) -> Token | None:
    """Returns the key of a user as the model takes it; None: it knows nobody by such a key."""
    if user is None or item["dtype"] == "string":
        return None if user is None else str(user)
    return read_whole_key(user)
