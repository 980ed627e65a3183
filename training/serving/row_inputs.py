"""What a request for a list says, and the row that is made of it and of what is stored."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from conf.artefacts.export import ENCODED_SUFFIX, FEATURE_PREFIX, RANK_ITEMS, ROW_FEATURES, Give
from training.apply.export import find_inputs
from training.apply.ranker import Ranker, RowInputs, find_items_input
from training.encoders.vocabularies import read_whole_key
from training.evaluation.item_index import ItemIds, find_cells
from training.index.item_columns import Token
from training.index.known_entities import KnownEntities
from training.raw_inputs.requests import (
    build_array,
    build_inputs,
    read_column,
    read_list,
    read_names,
)
from training.serving import limits as most
from training.serving.batching import Call, plan_call
from training.serving.errors import RequestError, cut
from training.serving.limits import RequestLimits
from training.serving.served_version import ServedVersion
from training.serving.tensors import Arrays

ROW_SIGNATURES = {"retrieval": str(Give.USER_EMBEDDING), "ranking": RANK_ITEMS}
"""Signature that takes raw values of a row, by the kind of the model."""


def _list_values(conditions: Any) -> Any:
    """Puts a value alone in a list; counts all before any is read."""
    if not isinstance(conditions, dict):
        return conditions
    listed = {name: one if isinstance(one, list) else [one] for name, one in conditions.items()}
    if (count := sum(map(len, listed.values()))) > most.FILTERED_VALUES:
        raise ValueError(f"a filter may have {most.FILTERED_VALUES} values; received {count}")
    return listed


def _read_whole(value: Any) -> Any:
    """A whole number may be written 10.0."""
    return int(value) if type(value) is float and value.is_integer() else value


Text = Annotated[str, Field(max_length=most.KEY_CHARACTERS)]
Key = int | Text
Value = int | Annotated[float, Field(allow_inf_nan=False)] | Text
Count = Annotated[int, BeforeValidator(_read_whole)]
Keys = Annotated[list[Key], Field(max_length=most.EXCLUDED), FailFast()]
Values = Annotated[list[Value], FailFast()]
Filter = Annotated[
    dict[str, Values], Field(max_length=most.FILTERED_COLUMNS), BeforeValidator(_list_values)
]


class ListRequest(BaseModel):
    """A request for a list."""

    model_config = ConfigDict(strict=True, frozen=True)

    user: Key | None = None
    features: dict[str, Any] = {}  # Raw values by input name; what is left out is missing.
    k: Count = Field(10, ge=1, le=most.LENGTH)
    candidates: Count = Field(200, ge=1, le=most.CANDIDATES)  # What a ranking model is to order.
    exclude: Keys = []
    filter: Filter = {}  # By column the values of which an item must have one.
    seen: bool = False  # Whether items that the user has met may be in the list.


def parse_request(data: Mapping[str, Any]) -> ListRequest:
    """Reads a request; the first thing that is wrong ends it."""
    allowed = ListRequest.model_fields
    if (unknown := next((name for name in data if name not in allowed), None)) is not None:
        raise RequestError(f"{cut(unknown, 100)}: unknown; allowed: {', '.join(allowed)}")
    try:
        request = ListRequest.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        name = found[0]["loc"][0]  # A value may be a number, or else text: an error each.
        said = "; ".join(one["msg"] for one in found if one["loc"][0] == name)
        raise RequestError(f"{name}: {said}") from error
    if request.user is None and not request.features:
        raise RequestError("a request needs 'user', 'features', or both")
    return request


class ListModel:
    """A version that lists are made by, and what it reads of a row."""

    def __init__(self, version: ServedVersion) -> None:
        self.version, self.engine = version, Ranker(version)
        users = version.card["users"] or {}
        self._key: str | None = users.get("key", version.card.get("user"))
        self._stored = frozenset(users.get("features", ()))
        self._aligned = users.get("aligned", ())
        # Features of what the user did, the main one first.
        self.histories: list[str] = list(users.get("histories", ()))
        self._signature = ROW_SIGNATURES[version.card["kind"]]
        self._items = find_inputs(version.card, self._signature)
        self._names, sources = read_names(self._items), read_names(self._items).sources
        # Names of features that a request may use: inputs, and columns of the source.
        self.allowed = frozenset({*self._names.by_name, *sources.values()})
        keys = {item["name"] for item in self._items if item["feature"] == self._key}
        self._key_names = keys | {sources[name] for name in keys & sources.keys()}

    @property
    def known(self) -> KnownEntities:
        if self.version.known is None:
            raise RequestError(f"the export of {self.version.name} holds no items")
        return self.version.known

    def find_user(self, request: ListRequest) -> int | None:
        """Returns the row of what is stored of the user; None: nothing is."""
        if request.user is None or self.known.users is None:
            return None
        return self.known.users.row_of.get(str(request.user))

    def find_met(self, column: str, row: int) -> np.ndarray:
        """Returns the positions of the items in a list that is stored of a user."""
        if self.known.users is None:
            return np.zeros(0, np.int64)
        met = self.known.users.read_list(column, row)
        return find_cells(np.array([len(met)]), met, ItemIds(self.known.ids)).columns

    def describe_inputs(self) -> dict[str, dict[str, Any]]:
        """Returns what a person must know to give what is not stored of users, by name."""
        has_users = self.version.known is not None and self.version.known.users is not None
        left_out = {self._key, *(self._stored if has_users else ())}
        return {
            item["name"]: {
                "name": item["name"],
                "column": item["column"],
                "type": item["dtype"],
                "is_list": item["is_list"],
                "is_required": _is_required(item),
                "is_time": read_column(item).read_unit is not None,
            }
            for item in self._items
            if item["feature"] not in left_out
        }

    def find_given(self, features: Mapping[str, Any]) -> set[str]:
        if named := next((name for name in features if name in self._key_names), None):
            raise RequestError(  # Nothing that is stored of the user would be used.
                f"features: {named[:100]} names the user, which 'user' does: leave it out"
            )
        return self._names.find_given(features)

    def read_histories(self, features: Mapping[str, Any]) -> dict[str, list[Token]]:
        """Returns the keys of items that a request gives as the user's histories, by feature."""
        given = self.find_given(features)
        return {
            item["feature"]: read_list(item["name"], features, self._names, RequestLimits.values)
            for item in self._items
            if item["feature"] in self.histories and item["name"] in given
        }

    def apply(
        self, request: ListRequest, limits: RequestLimits, keys: np.ndarray | None = None
    ) -> Generator[Call, Arrays, Arrays]:
        """Returns the row's vector, or what tasks order the items of `keys` `[1, items]` by."""
        rows = yield from self.read_row(request, limits)
        inputs, name = rows.arrays, ""
        if keys is not None:
            name = find_items_input(self.version.card)
            inputs = {**inputs, name: keys}

        def apply(given: Arrays) -> Arrays:
            made = RowInputs(given, rows.is_encoded)
            if keys is not None:
                return dict(self.engine.order_items(made, given[name]))
            return {"embedding": self.engine.embed(made)}

        signature = rows.name_signature(self._signature)
        return (yield plan_call(self.version, signature, inputs, limits, apply))

    def read_row(
        self, request: ListRequest, limits: RequestLimits
    ) -> Generator[Call, Arrays, RowInputs]:
        """Returns the row of a request; what is stored stands where the request says nothing.

        It is stored as the records hold it: what the request says beside it takes that form first.
        """
        row = self.find_user(request)
        stored = frozenset() if row is None else self.find_stored(request.features)
        if row is None or not stored:
            return RowInputs(self.read_raw(self._signature, request, (), limits.values))
        encoded = f"{self._signature}{ENCODED_SUFFIX}"
        found = self.read_stored(encoded, row, stored)
        names = [item["name"] for item in find_inputs(self.version.card, encoded)]
        if others := [name for name in names if name not in found]:
            said = self.read_raw(ROW_FEATURES, request, stored, limits.values)
            made = yield plan_call(self.version, ROW_FEATURES, said, limits)
            found |= {name: made[name] for name in others}
        return RowInputs(found, is_encoded=True)

    def find_stored(self, features: Mapping[str, Any]) -> frozenset[str]:
        """Returns the features that are taken from what is stored: all that are not given.

        Of lists that stand beside each other, and of parts of a feature, all are given or none.
        """
        given, read = self.find_given(features), {item["feature"] for item in self._items}
        said = {item["feature"] for item in self._items if item["name"] in given}
        for feature in said & self._stored:
            parts = [item for item in self._items if item["feature"] == feature]
            there = [item["column"] for item in parts if item["name"] in given]
            if len(there) < len(parts):
                raise RequestError(
                    f"features: {feature} is made of {', '.join(item['column'] for item in parts)}"
                    f"; received {', '.join(there)}: give all of them, or none"
                )
        for group in self._aligned:
            missing = sorted(read.intersection(group) - said)
            if missing and (there := sorted(said.intersection(group))):
                raise RequestError(
                    f"features: {', '.join(there)} came without {', '.join(missing)}, which stands "
                    "beside it value for value: give both, or neither"
                )
        return frozenset(read & self._stored - said)

    def read_stored(self, signature: str, row: int, stored: Collection[str]) -> Arrays:
        users = self.known.users
        user = {} if users is None else users.table.slice(row, 1)
        specs, inputs = self.version.find_signature(signature).specs, {}
        for item in find_inputs(self.version.card, signature):
            if item["feature"] in stored:
                value = user[f"{FEATURE_PREFIX}{item['feature']}"].to_pylist()
                inputs[item["name"]] = build_array(item["name"], value, specs[item["name"]])
        return inputs

    def read_raw(
        self, signature: str, request: ListRequest, stored: Collection[str], values: int
    ) -> Arrays:
        """Returns one row of raw values; the place of what is stored is filled."""
        specs, features, filled = self.version.find_signature(signature).specs, request.features, {}
        given = {name: [value] for name, value in features.items()}
        for item in self._items:
            name, key = item["name"], None
            if any(features.get(one) is not None for one in self._names.list_names(name)):
                continue
            if item["feature"] in stored and _is_required(item):
                filler = "" if item["dtype"] == "string" else 0
                filled[name] = build_array(name, [filler], specs[name])  # Not read: no time, say.
                continue
            if item["feature"] == self._key and request.user is not None:
                is_text = item["dtype"] == "string"
                key = str(request.user) if is_text else read_whole_key(request.user)
            given[name] = [key]
        rest = {name: specs[name] for name in self._names.by_name if name not in filled}
        return filled | build_inputs(given, rest, self._names, values)


def _is_required(item: Mapping[str, Any]) -> bool:
    """Whether a row must have a value; a list may be missing: it is empty then."""
    return bool(item.get("is_required")) and not item["is_list"]
