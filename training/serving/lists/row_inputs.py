"""Rows of requests for lists: what a request says of the user, and else what is stored."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

from conf.artefacts.export import ENCODED_SUFFIX, FEATURE_PREFIX, RANK_ITEMS, ROW_FEATURES, Give
from training.apply.export import find_inputs
from training.apply.ranker import Ranker, RowInputs
from training.index.item_columns import Token
from training.index.known_entities import KnownEntities
from training.raw_inputs.export_inputs import read_column
from training.raw_inputs.json_values import build_array, read_written
from training.raw_inputs.source_names import SourceNames, find_sources, name_inputs
from training.raw_inputs.vocabularies import read_whole_key
from training.serving.models.batching import Call, plan_call
from training.serving.models.served_version import ServedVersion
from training.serving.requests.errors import RequestError, refuse_values
from training.serving.requests.limits import RequestLimits
from training.serving.requests.recommend_request import RecommendRequest
from training.serving.requests.tensors import Arrays

ROW_SIGNATURES = {"retrieval": str(Give.USER_EMBEDDING), "ranking": RANK_ITEMS}
"""Signature that takes raw values of a row, by the kind of the model."""


class ListModel:
    """A version that lists are made by, and what it reads of a row.

    Attributes:
        engine: Calls it.
        items: What `export.json` says of the inputs that are features of a row.
        allowed: Names that a request may use: those of the inputs, and of the source's columns.
        histories: Features of what the user did, the main one first.
    """

    def __init__(self, version: ServedVersion) -> None:
        self.version, self.engine = version, Ranker(version)
        users = version.card["users"] or {}
        self._key: str | None = users.get("key", version.card.get("user"))
        self._stored = frozenset(users.get("features", ()))
        self._aligned = users.get("aligned", ())
        self.histories: list[str] = list(users.get("histories", ()))
        self._signature = ROW_SIGNATURES[version.card["kind"]]
        self.items = find_inputs(version.card, self._signature)
        self._names = tuple(item["name"] for item in self.items)
        self._sources, columns = SourceNames.build(self.items), find_sources(self.items)
        self.allowed = frozenset({*self._names, *columns.values()})
        keys = {item["name"] for item in self.items if item["feature"] == self._key}
        self._key_names = keys | {column for name, column in columns.items() if name in keys}

    @property
    def known(self) -> KnownEntities:
        if self.version.known is None:
            raise RequestError(f"the export of {self.version.name} holds no items")
        return self.version.known

    def find_user(self, request: RecommendRequest) -> int | None:
        """Returns the row of what is stored of the user; None: nothing is."""
        users = self.known.users
        return (
            None if request.user is None or users is None else users.row_of.get(str(request.user))
        )

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
            for item in self.items
            if item["feature"] not in left_out
        }

    @refuse_values()
    def name_given(self, features: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what a request says, by the names of the inputs.

        Raises:
            RequestError: It names the user: nothing that is stored of the user would be used then.
        """
        if named := next((name for name in features if name in self._key_names), None):
            raise RequestError(
                f"features: {named[:100]} names the user, which 'user' does: leave it out"
            )
        return name_inputs(features, self._names, self._sources) if features else {}

    @refuse_values()
    def read_histories(self, given: Mapping[str, Any]) -> dict[str, list[Token]]:
        """Returns the keys of items that a request gives as the user's histories, by feature."""
        found: dict[str, list[Token]] = {}
        for item in self.items:
            if item["feature"] in self.histories and item["name"] in given:
                value = read_written(given[item["name"]], 0, item, RequestLimits.values)
                if isinstance(value, list):
                    keys = (int(one) if _is_whole(one) else one for one in value)
                    found[item["feature"]] = [one for one in keys if type(one) in (int, str)]
        return found

    def read_row(
        self, request: RecommendRequest, limits: RequestLimits
    ) -> Generator[Call, Arrays, RowInputs]:
        """Returns the row of a request.

        What is stored of the user stands where the request says nothing. It is stored as the
        records hold it, so that what the request says beside it is brought into that form first.

        Raises:
            RequestError: A value does not fit, or must be there and is not.
        """
        given, row = self.name_given(request.features), self.find_user(request)
        stored = self.find_stored(given) if row is not None else frozenset()
        raw = f"{self._signature}{ENCODED_SUFFIX}" if stored else self._signature
        if row is None or not stored:
            return RowInputs(self.read_raw(raw, request, given, (), limits.values))
        found = self.read_stored(raw, row, stored)
        names = [item["name"] for item in find_inputs(self.version.card, raw)]
        if others := [name for name in names if name not in found]:
            said = self.read_raw(ROW_FEATURES, request, given, stored, limits.values)
            made = yield plan_call(self.version, ROW_FEATURES, said, limits)
            found |= {name: made[name] for name in others}
        return RowInputs(found, is_encoded=True)

    def find_stored(self, given: Mapping[str, Any]) -> frozenset[str]:
        """Returns the features that are taken from what is stored: all that are not given.

        Raises:
            RequestError: A list is given, and not one that stands beside it; or a part of what a
                stored feature is made of.
        """
        read = {item["feature"] for item in self.items}
        said = {item["feature"] for item in self.items if item["name"] in given}
        for feature in said & self._stored:
            self._refuse_parts(feature, given)
        for group in self._aligned:
            there, missing = said.intersection(group), read.intersection(group) - said
            if there and missing:
                raise RequestError(
                    f"features: {', '.join(sorted(there))} came without "
                    f"{', '.join(sorted(missing))}, which stands beside it value for value: give "
                    "both, or neither"
                )
        return frozenset(read & self._stored - said)

    def _refuse_parts(self, feature: str, given: Mapping[str, Any]) -> None:
        """Refuses some of the columns that a stored feature is made of: the others are unknown."""
        parts = [item for item in self.items if item["feature"] == feature]
        said = [item["column"] for item in parts if item["name"] in given]
        if len(said) < len(parts):
            raise RequestError(
                f"features: {feature} is made of {', '.join(item['column'] for item in parts)}; "
                f"received {', '.join(said)}: give all of them, or none"
            )

    def read_stored(self, signature: str, row: int, stored: Collection[str]) -> Arrays:
        """Returns what is stored of a user as a signature of encoded features takes it."""
        users = self.known.users
        user = users.table.slice(row, 1) if users is not None else {}
        specs, inputs = self.version.find_specs(signature), {}
        for item in find_inputs(self.version.card, signature):
            if item["feature"] in stored:
                value = user[f"{FEATURE_PREFIX}{item['feature']}"].to_pylist()
                inputs[item["name"]] = build_array(item["name"], value, specs[item["name"]])
        return inputs

    @refuse_values()
    def read_raw(
        self,
        signature: str,
        request: RecommendRequest,
        given: Mapping[str, Any],
        stored: Collection[str],
        most: int,
    ) -> Arrays:
        """Returns one row of raw values; what the request leaves out is missing.

        A signature takes all of its inputs, so that the place of what is stored is filled.
        """
        specs, inputs = self.version.find_specs(signature), {}
        for item in self.items:
            name, value = item["name"], given.get(item["name"])
            if value is None and item["feature"] in stored and _is_required(item):
                filler = "" if item["dtype"] == "string" else 0
                inputs[name] = build_array(name, [filler], specs[name])  # Not read: no time, say.
                continue
            if value is None and item["feature"] == self._key:
                value = _read_key(request.user, item)
            inputs[name] = build_array(name, [value], specs[name], item, most)
        return inputs


def _is_required(item: Mapping[str, Any]) -> bool:
    """Whether a row must have a value; a list may be missing: it is empty then."""
    return bool(item.get("is_required")) and not item["is_list"]


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _read_key(user: Token | None, item: Mapping[str, Any]) -> Token | None:
    """Returns the key of a user as the model takes it; None: it knows nobody by such a key."""
    if user is None or item["dtype"] == "string":
        return None if user is None else str(user)
    return read_whole_key(user)


def check_features(request: RecommendRequest, models: Collection[ListModel]) -> None:
    """Refuses features that no model reads, and a request that says nothing of a user."""
    if request.user is None and not request.features:
        raise RequestError("a request needs 'user', 'features', or both")
    names = frozenset().union(*(model.allowed for model in models))
    if (unknown := next((name for name in request.features if name not in names), None)) is None:
        return
    raise RequestError(f"unknown features {[unknown[:100]]}; allowed: {', '.join(sorted(names))}")
