"""`/v1/recommend`: from a user to a ranked list of items.

The user's features come from the export (`users.parquet`) or the request; a retrieval model finds
items, a ranking model, if there is one, orders them; what the user has met, what is blocked or
asked to be left out, and what a filter does not name is not among them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import orjson
import tensorflow as tf

from conf.errors import ConfigError
from conf.export import FEATURE_PREFIX, SEEN
from training.scoring.input_columns import InputColumn, find_sources
from training.serving.batching import Batcher, Builder
from training.serving.errors import NOT_FOUND, RequestError, cut
from training.serving.known import Known, Token
from training.serving.model_store import ModelStore, ServedVersion
from training.serving.tensors import Arrays, build_array, show
from training.serving.vector_index import Found
from training.serving.written_json import SourceNames, name_inputs

ROW_FEATURES = "row_features"
"""Signature that gives what the `…_encoded` ones take of a row, of raw values."""
SCORES = "score_items"
"""Signature that gives the scores of items by their keys."""
_ROW_SIGNATURES = {"retrieval": "user_embedding", "ranking": SCORES}
"""Signature that takes raw values of a row, by the kind of the model."""
ITEM_BYTES = 128
"""About so long is an item of the answer."""
CALL_ITEMS = 20_000
"""Items that a ranking model scores in one call where nothing retrieves them."""

Value = int | float | str

_log = logging.getLogger("sluice.training.serving")

LENGTH, CANDIDATES = 1000, 5000
EXCLUDED, KEY_BYTES = 10_000, 1024
FILTERED_COLUMNS, FILTERED_VALUES = 32, 1000


def describe_limits() -> dict[str, int]:
    """Returns the limits of a request for a list, by name."""
    return {
        "recommend_k": LENGTH,
        "recommend_candidates": CANDIDATES,
        "recommend_exclude": EXCLUDED,
        "recommend_key_bytes": KEY_BYTES,
        "recommend_filter_columns": FILTERED_COLUMNS,
        "recommend_filter_values": FILTERED_VALUES,
    }


@dataclass(frozen=True)
class RecommendRequest:
    """A request for a list.

    Attributes:
        user: The user's raw key; None: `features` say all.
        features: Raw values by input name; what is left out is missing.
        k: Length of the list.
        candidates: Items that are retrieved for the ranking model.
        exclude: Items that are left out.
        filter: Values of which an item must have one, by column.
        seen: Whether items that the user has met may be in the list.
    """

    user: Token | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    k: int = 10
    candidates: int = 200
    exclude: Sequence[Token] = ()
    filter: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    seen: bool = False


def parse_recommend(data: Mapping[str, Any]) -> RecommendRequest:
    """Reads a request; the first thing that is wrong ends it.

    Raises:
        RequestError: A key is unknown, or its value is not of its type or longer than it may be.
    """
    for name in data:
        if name not in _READERS:
            raise RequestError(f"{cut(name, 100)}: unknown; allowed: {', '.join(_READERS)}")
    return RecommendRequest(**{name: _READERS[name](name, value) for name, value in data.items()})


def _read_user(name: str, value: Any) -> Token | None:
    return None if value is None else _read_keys(name, [value])[0]


def _read_keys(name: str, value: Any) -> list[Token]:
    if not isinstance(value, list) or len(value) > EXCLUDED:
        _refuse(name, f"a list of {EXCLUDED} keys at most", value)
    for key in value:
        if type(key) is not int and not isinstance(key, str):
            _refuse(name, "text or a whole number", key)
        if isinstance(key, str):
            _check_text(name, key)
    return value


def _check_text(name: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: {value[:100]!r} holds half of a character") from error
    if size > KEY_BYTES:
        raise RequestError(f"{name}: a key may have {KEY_BYTES} bytes; received {size}")


def _read_features(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(name, "an object of raw values", value)
    return value


def _read_count(name: str, value: Any) -> int:
    most = LENGTH if name == "k" else CANDIDATES
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or not 1 <= value <= most:
        _refuse(name, f"a whole number from 1 to {most}", value)
    return int(value)


def _read_filter(name: str, value: Any) -> Mapping[str, Sequence[Value]]:
    if not isinstance(value, dict) or len(value) > FILTERED_COLUMNS:
        _refuse(name, f"an object of {FILTERED_COLUMNS} columns at most", value)
    found = {
        column: wanted if isinstance(wanted, list) else [wanted] for column, wanted in value.items()
    }
    if (count := sum(map(len, found.values()))) > FILTERED_VALUES:
        raise RequestError(f"{name}: a filter may have {FILTERED_VALUES} values; received {count}")
    for column, wanted in found.items():
        for one in wanted:
            is_number = type(one) is int or (type(one) is float and math.isfinite(one))
            if isinstance(one, str):
                _check_text(name, one)
            elif not is_number:
                _refuse(f"{name}.{cut(column, 100)}", "text, finite numbers or a list of them", one)
    return found


def _read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "user": _read_user,
    "features": _read_features,
    "k": _read_count,
    "candidates": _read_count,
    "exclude": _read_keys,
    "filter": _read_filter,
    "seen": _read_flag,
}


def _refuse(name: str, allowed: str, value: Any) -> NoReturn:
    raise RequestError(f"{name}: must be {allowed}; received {show(value)}")


@dataclass(frozen=True)
class RecommendConfig:
    """What answers.

    Attributes:
        retrieval: Name of the retrieval model; None: the only one there is, if any.
        ranker: Name of the ranking model; None: the only one there is, if any.
        items_file: Titles and further columns of the items, the first one the key; None: those of
            the index.
        blocked_file: Keys of items that are never recommended, one a line.
        is_ranked: Whether a ranking model orders lists, where there is one.
    """

    retrieval: str | None = None
    ranker: str | None = None
    items_file: Path | None = None
    blocked_file: Path | None = None
    is_ranked: bool = True


class Recommender:
    """Answers `/v1/recommend`.

    Args:
        store: The models.
        batcher: Calls their signatures.
        builder: Builds what they are given, and the answer.
        config: What answers.

    Raises:
        ConfigError: A named model is not there, or of the other kind; or the ranking model that
            would order lists cannot.
    """

    def __init__(
        self, store: ModelStore, batcher: Batcher, builder: Builder, config: RecommendConfig
    ) -> None:
        self._store, self._batcher, self._builder = store, batcher, builder
        self._config = config
        for name, kind in ((config.retrieval, "retrieval"), (config.ranker, "ranking")):
            if name is not None and name not in self._list(kind):
                raise ConfigError(
                    f"there is no exported {kind} model of that name",
                    received=name,
                    allowed=", ".join(self._list(kind)) or "none",
                )
        for name in self._list("ranking"):
            self.check_version(store.get(name))
        for kind, is_open in (
            ("retrieval", config.retrieval is None),
            ("ranking", config.ranker is None and config.is_ranked),
        ):
            if is_open and len(names := self._list(kind)) > 1:
                _log.warning("/v1/recommend refuses requests: %s", _ask_for_one(kind, names))
        if not any(self._can_recommend(name) for name in store.names):
            _log.info("/v1/recommend has no lists: %s", self._explain_none())

    def check_version(self, version: ServedVersion) -> None:
        """Refuses a version of the ranking model that orders lists, if it cannot order them.

        Raises:
            ConfigError: It cannot, and was named, or would be asked for each list.
        """
        config = self._config
        if version.card["kind"] != "ranking" or not config.is_ranked:
            return
        rankers = {*self._list("ranking"), version.name}
        is_chosen = config.ranker == version.name if config.ranker else rankers == {version.name}
        found = [config.retrieval] if config.retrieval else self._list("retrieval")
        retrieval = self._store.get(found[0]) if len(found) == 1 else None
        if not is_chosen or (config.ranker is None and retrieval is None):
            return  # It answers for itself, and orders nothing.
        if (reason := explain_no_ranking(version, retrieval)) is not None:
            raise ConfigError(
                f"ranking model {version.name}, version {version.number}, cannot order lists",
                received=reason,
                fix="name another one by --ranker, or give --no-ranker: lists of the retrieval "
                "model alone",
            )

    def _can_recommend(self, name: str) -> bool:
        version = self._store.get(name)
        if version.card["kind"] == "retrieval":
            return True
        return self._config.is_ranked and explain_no_ranking(version, None) is None

    def _list(self, kind: str) -> list[str]:
        return [n for n in self._store.names if self._store.get(n).card["kind"] == kind]

    def _choose(self, kind: str, name: str | None) -> ServedVersion | None:
        names = [name] if name is not None else self._list(kind)
        if len(names) > 1:
            raise RequestError(_ask_for_one(kind, names))
        return self._store.get(names[0]) if names else None

    def _choose_models(self) -> tuple[ServedVersion | None, ServedVersion | None]:
        """Returns what retrieves and what ranks.

        Raises:
            RequestError: There is neither, or there are several.
        """
        retrieval = self._choose("retrieval", self._config.retrieval)
        ranker = None
        if self._config.is_ranked:
            ranker = self._choose("ranking", self._config.ranker)
        if ranker is not None and SCORES not in ranker.signatures:
            ranker = None  # It is alone: else it was refused when it was loaded.
        if retrieval is None and ranker is None:
            raise RequestError(self._explain_none(), NOT_FOUND)
        return retrieval, ranker

    def describe_inputs(self) -> dict[str, Any]:
        """Returns what a request may say beside the user: inputs that are not stored of users.

        Raises:
            RequestError: No model recommends.
        """
        found: dict[str, dict[str, Any]] = {}
        for version in filter(None, self._choose_models()):
            users = version.card["users"] or {}
            known = {users.get("key")}
            if version.known is not None and version.known.users is not None:
                known |= set(users.get("features", ()))
            for item in _describe_rows(version, _ROW_SIGNATURES[version.card["kind"]]):
                if item["feature"] not in known:
                    found.setdefault(item["name"], _describe_input(item))
        return {"inputs": list(found.values())}

    async def recommend(self, request: RecommendRequest, size: int) -> bytes:
        """Returns the body of the answer.

        Args:
            request: The request.
            size: Bytes that it came in.

        Raises:
            RequestError: The request does not fit the models.
        """
        retrieval, ranker = self._choose_models()
        models = [model for model in (retrieval, ranker) if model is not None]
        first = models[0]
        known = _require_known(first)
        row = _find_user(known, request)
        _check_features(request, models)
        scores: dict[str, np.ndarray] = {}
        if retrieval is not None:
            vector = await self._embed(retrieval, known, request, row, size)
            order, scores["retrieval_score"] = await self._batcher.run(
                self._search, known, request, row, vector, self._count(request, ranker)
            )
        else:
            allowed = await self._batcher.run(self._find_allowed, known, request, row)
            order = np.flatnonzero(allowed)[: min(CALL_ITEMS, self._batcher.most_candidates)]
        if ranker is not None:
            order, scores = await self._rank(ranker, known, request, order, scores, size)
        return await self._builder.run(
            ITEM_BYTES * request.k, _describe,
            request, known, row, order[: request.k], scores, first, ranker,
        )  # fmt: skip

    def _explain_none(self) -> str:
        """Says of each ranking model why it orders no items; there is no retrieval model."""
        models = [self._store.get(name) for name in self._store.names]
        unused = "the server was started with --no-ranker"
        reasons = [
            f"{one.name} has no lists: {explain_no_ranking(one, None) or unused}" for one in models
        ]
        return f"no model of the server recommends items: {'; '.join(reasons)}"

    def _count(self, request: RecommendRequest, ranker: ServedVersion | None) -> int:
        if ranker is None:
            return request.k
        return min(max(request.k, request.candidates), self._batcher.most_candidates)

    def _search(
        self, known: Known, request: RecommendRequest, row: int | None, vector: np.ndarray, k: int
    ) -> Found:
        if known.index is None:
            raise RequestError("the retrieval model has no items")
        return known.index.search(vector, k, self._find_allowed(known, request, row))

    def _find_allowed(self, known: Known, request: RecommendRequest, row: int | None) -> np.ndarray:
        """Returns which items may be in the list, `[items]`."""
        allowed = known.allowed.copy()
        if request.filter:
            if known.columns is None:
                raise RequestError("'filter' needs an index with columns, or --items FILE")
            allowed &= known.columns.find(request.filter)
        for key in request.exclude:
            if (position := known.position_of.get(str(key))) is not None:
                allowed[position] = False
        if row is not None and not request.seen and known.users is not None:
            allowed[known.find_positions(known.users.read_list(SEEN, row))] = False
        return allowed

    async def _embed(
        self,
        version: ServedVersion,
        known: Known,
        request: RecommendRequest,
        row: int | None,
        size: int,
    ) -> np.ndarray:
        signature, inputs = await self._read_row(
            version, "user_embedding", known, request, row, size
        )
        found = await self._batcher.call(version, signature, inputs)
        return found["embedding"][0]

    async def _read_row(
        self,
        version: ServedVersion,
        signature: str,
        known: Known,
        request: RecommendRequest,
        row: int | None,
        size: int,
    ) -> tuple[str, Arrays]:
        """Returns the signature to call, and what it takes of the row.

        What is stored of a user stands where the request says nothing. It is stored as the records
        hold it, so that what the request says beside it is brought into that form first.
        """
        stored = _find_stored(version, signature, known, request, row)
        if row is None or not stored:
            return signature, await self._builder.run(
                size, _raw_inputs, version, signature, request, stored
            )
        encoded = f"{signature}_encoded"
        inputs = _encoded_inputs(version, encoded, known, row, stored)
        others = [
            item["name"] for item in _describe_rows(version, encoded) if item["name"] not in inputs
        ]
        if others:
            _require_row_features(version, others)
            raw = await self._builder.run(size, _raw_inputs, version, ROW_FEATURES, request, stored)
            made = await self._batcher.call(version, ROW_FEATURES, raw)
            inputs |= {name: made[name] for name in others}
        return encoded, inputs

    async def _rank(
        self,
        ranker: ServedVersion,
        known: Known,
        request: RecommendRequest,
        order: np.ndarray,
        scores: dict[str, np.ndarray],
        size: int,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        own = _require_known(ranker)
        row = _find_user(own, request)
        signature, inputs = await self._read_row(ranker, SCORES, own, request, row, size)
        name, spec = _find_items_input(ranker, signature)
        inputs[name] = await self._builder.run(
            8 * len(order), _read_items, known, name, order, spec
        )
        found = await self._batcher.call(ranker, signature, inputs)
        names = [output["name"] for output in ranker.card["outputs"]]
        tasks = {f"score:{task}": found[task][0] for task in names}
        best = np.argsort(-found[names[0]][0], kind="stable")
        merged = {**tasks, **scores}
        return order[best], {name: value[best] for name, value in merged.items()}


def _read_items(known: Known, name: str, order: np.ndarray, spec: Any) -> np.ndarray:
    return build_array(name, [[known.keys[n] for n in order]], spec)


def _ask_for_one(kind: str, names: Sequence[str]) -> str:
    return (
        f"several {kind} models answer: {', '.join(names)}; "
        f"start the server with --{'retrieval' if kind == 'retrieval' else 'ranker'}"
    )


def explain_no_ranking(ranker: ServedVersion, retrieval: ServedVersion | None) -> str | None:
    """Says why a ranking model cannot order lists; None: it can.

    Args:
        ranker: The ranking model.
        retrieval: What finds the items; None: the ranking model orders its catalogue.
    """
    if SCORES not in ranker.signatures:
        why = "it reads no feature of role item that is made of the item alone"
        return f"no signature {SCORES}, as {ranker.card.get('no_item_scores', why)}"
    if ranker.known is None:
        return "its export holds no items"
    if retrieval is None or retrieval.known is None:
        return None
    name, spec = _find_items_input(ranker, SCORES)
    keys = retrieval.known.keys
    if keys and isinstance(keys[0], str) != (spec.dtype == tf.string):
        kind = "text" if isinstance(keys[0], str) else "whole numbers"
        return f"its input {name} is {spec.dtype.name}, and keys of {retrieval.name} are {kind}"
    if ranker.known.position_of.keys().isdisjoint(retrieval.known.position_of):
        return f"it knows none of the items of {retrieval.name}"
    return None


def _require_known(version: ServedVersion) -> Known:
    if version.known is None:
        raise RequestError(f"the export of {version.name} holds no items")
    return version.known


def _find_user(known: Known, request: RecommendRequest) -> int | None:
    if request.user is None or known.users is None:
        return None
    return known.users.row_of.get(str(request.user))


def _describe(
    request: RecommendRequest,
    known: Known,
    row: int | None,
    order: np.ndarray,
    scores: Mapping[str, np.ndarray],
    first: ServedVersion,
    ranker: ServedVersion | None,
) -> bytes:
    histories = {name: describe_history(known, name, row) for name in list_histories(first)}
    items = [
        {"item": known.keys[position],
         **{name: value[place] for name, value in scores.items()},
         **columns}
        for place, (position, columns) in enumerate(
            zip(order, known.get_columns(order), strict=True))
    ]  # fmt: skip
    models = [m for m in dict.fromkeys((first, ranker)) if m is not None]
    answer = {
        "user": request.user,
        "known": row is not None,
        "items": items,
        "history": next(iter(histories.values()), []),
        "histories": histories,
        "models": [_describe_model(model) for model in models],
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def list_histories(version: ServedVersion) -> list[str]:
    """Names of the lists that hold what a user did, the main one first."""
    users = version.card["users"] or {}
    earlier = [users["history"]] if users.get("history") else []  # Of exports before several.
    return list(users.get("histories", earlier))


def describe_history(known: Known, name: str, row: int | None) -> list[dict[str, Any]]:
    """Returns the items of a user's list; nothing of a user who is not known."""
    if row is None or known.users is None:
        return []
    met = known.find_positions(known.users.read_list(f"{FEATURE_PREFIX}{name}", row))
    described = zip(met, known.get_columns(met), strict=True)
    return [{"item": known.keys[position], **columns} for position, columns in described]


def _describe_model(model: ServedVersion) -> dict[str, str]:
    about = {"name": model.name, "version": str(model.number)}
    return about if model.index is None else {**about, "index": str(model.index)}


def _describe_inputs(version: ServedVersion, signature: str) -> Sequence[Mapping[str, Any]]:
    inputs: Sequence[Mapping[str, Any]] = version.card["signatures"][signature]["inputs"]
    return inputs


def _find_items_input(version: ServedVersion, signature: str) -> tuple[str, Any]:
    name = next(i["name"] for i in _describe_inputs(version, signature) if "means" in i)
    return name, version.find_specs(signature)[name]


def _describe_rows(version: ServedVersion, signature: str) -> list[Mapping[str, Any]]:
    """What `export.json` says of the inputs that are features of the row."""
    return [item for item in _describe_inputs(version, signature) if "means" not in item]


def _describe_input(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a person must know to give a value."""
    return {
        "name": item["name"],
        "column": item["column"],
        "type": item["dtype"],
        "is_list": item["is_list"],
        "is_required": item.get("is_required", False),
        "is_time": InputColumn.from_json(item).read_unit is not None,
    }


def _find_stored(
    version: ServedVersion,
    signature: str,
    known: Known,
    request: RecommendRequest,
    row: int | None,
) -> frozenset[str]:
    """Returns the features that are taken from what is stored of a user: all that are not given."""
    if row is None or known.users is None:
        return frozenset()
    about = _describe_rows(version, signature)
    given = _name_given(request, about)
    read = {item["feature"] for item in about}
    said = {item["feature"] for item in about if item["name"] in given}
    return frozenset(read & set((version.card["users"] or {}).get("features", ())) - said)


def _name_given(request: RecommendRequest, about: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if not request.features:
        return {}
    names = [item["name"] for item in about]
    return name_inputs(request.features, names, SourceNames.build(about))


def _require_row_features(version: ServedVersion, names: Sequence[str]) -> None:
    if ROW_FEATURES not in version.signatures:
        raise RequestError(
            f"{version.name} reads {', '.join(names)} of the request beside what is stored of the "
            "user, which an export of an earlier release cannot: export the run again"
        )


def _encoded_inputs(
    version: ServedVersion, signature: str, known: Known, row: int, stored: Collection[str]
) -> Arrays:
    """Returns what is stored of a user."""
    if known.users is None:
        raise RequestError("the export holds no users")
    specs, inputs = version.find_specs(signature), {}
    user = known.users.table.slice(row, 1)
    for item in _describe_rows(version, signature):
        if item["feature"] in stored:
            value = user[f"{FEATURE_PREFIX}{item['feature']}"].to_pylist()
            inputs[item["name"]] = build_array(item["name"], value, specs[item["name"]])
    return inputs


def _raw_inputs(
    version: ServedVersion, signature: str, request: RecommendRequest, stored: Collection[str]
) -> Arrays:
    """Returns one row of raw values; what the request leaves out is missing.

    What is stored must not be there: its place is filled, as a signature takes all of its inputs.
    """
    about = _describe_rows(version, signature)
    key = (version.card["users"] or {}).get("key")
    specs, inputs = version.find_specs(signature), {}
    given = _name_given(request, about)
    for item in about:
        value = given.get(item["name"])
        if value is None and item["feature"] in stored and item.get("is_required"):
            value = "" if item["dtype"] == "string" else 0
        elif value is None and item["feature"] == key:
            value = _read_key(request.user, item)
        inputs[item["name"]] = build_array(item["name"], [value], specs[item["name"]], item)
    return inputs


def _check_features(request: RecommendRequest, models: Sequence[ServedVersion]) -> None:
    if request.user is None and not request.features:
        raise RequestError("a request needs 'user', 'features', or both")
    names: set[str] = set()
    for model in models:
        about = _describe_rows(model, _ROW_SIGNATURES[model.card["kind"]])
        names |= {item["name"] for item in about}
        names |= set(find_sources(about).values())
    if unknown := [name[:100] for name in request.features if name not in names][:1]:
        raise RequestError(f"unknown features {unknown}; allowed: {', '.join(sorted(names))}")


def _read_key(user: Token | None, item: Mapping[str, Any]) -> Token | None:
    if user is None or item["dtype"] == "string":
        return None if user is None else str(user)
    try:
        return int(user)
    except ValueError:
        return None  # Text where users are numbers: nobody whom the model knows.
