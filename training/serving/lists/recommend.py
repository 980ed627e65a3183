"""`/v1/recommend`: from a user to a ranked list of items, by the engine.

The user's features come from the export (`users.parquet`) or the request; a retrieval model finds
items, a ranking model, if there is one, orders them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson
import tensorflow as tf

from conf.artefacts.export import FEATURE_PREFIX, RANK_ITEMS, Give
from conf.errors import ConfigError, did_you_mean
from training.apply.ranker import RowInputs, find_items_input
from training.index.item_columns import Token, WrongFilterError
from training.index.known_entities import KnownEntities
from training.serving.lists.row_inputs import ListModel, ListRequest, parse_request
from training.serving.models.batching import Call, Steps, plan_call
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import RecommendConfig
from training.serving.requests.errors import NOT_FOUND, RequestError
from training.serving.requests.limits import CALL_ITEMS, RequestLimits
from training.serving.requests.tensors import Arrays, encode_json, parse_json

KINDS = ("retrieval", "ranking")
Histories = Mapping[str, list[Token]]  # Keys of items by the feature of their list.


class ListModels:
    """Chooses which models answer, and refuses versions that cannot.

    A model that was the only one of its kind goes on answering where a second one appears.
    """

    def __init__(self, store: ModelStore, config: RecommendConfig) -> None:
        self._store, self._config = store, config
        self._kinds = KINDS if config.is_ranked else KINDS[:1]
        named = {"retrieval": config.retrieval, "ranking": config.ranker}
        self._names = {kind: name for kind, name in named.items() if name is not None}
        self._kept: dict[str, ListModel] = {}
        for kind, name in self._names.items():
            if name not in (found := self._list(kind)):
                raise ConfigError(
                    f"there is no exported {kind} model of that name",
                    received=name,
                    allowed=", ".join(found) or "none",
                    fix=did_you_mean(name, found),
                )
        for version in self._list("ranking").values():
            self.check_version(version)

    def check_version(self, version: ServedVersion) -> None:
        """Refuses a new version with which the ranking model could not order the lists."""
        retrieval, ranker = (self._find(kind, version) for kind in KINDS)
        if ranker is None or version not in (retrieval, ranker):
            return
        if retrieval is None and self._config.ranker is None:
            return  # It answers for itself, and orders nothing.
        if (reason := explain_no_ranking(ranker, retrieval)) is not None:
            beside = "" if version is ranker else f", beside {_name(version)}"
            raise ConfigError(
                f"ranking model {_name(ranker)}{beside}, cannot order lists",
                received=reason,
                fix="name another one by --ranker, go back to an earlier version by `sluice models "
                "rollback`, or give --no-ranker: lists of the retrieval model alone",
            )

    def choose(self) -> tuple[ListModel | None, ListModel | None]:
        """Returns what retrieves and what ranks."""
        retrieval, ranker = (self._find(kind) for kind in KINDS)
        for kind, version in zip(self._kinds, (retrieval, ranker), strict=False):
            if version is None and (several := self._list(kind)):
                raise RequestError(_ask_for_one(kind, several))
        if ranker is not None and RANK_ITEMS not in ranker.signatures:
            ranker = None  # It is alone: else it was refused when it was loaded.
        if retrieval is None and ranker is None:
            unused = "the server was started with --no-ranker"
            reasons = [f"{name}: {explain_no_ranking(one, None) or unused}"
                       for name, one in self._list("ranking").items()]  # fmt: skip
            why = f"no model of the server recommends items: {'; '.join(reasons)}"
            raise RequestError(why, NOT_FOUND)
        return self._keep(retrieval), self._keep(ranker)

    def _keep(self, version: ServedVersion | None) -> ListModel | None:
        if version is None:
            return None
        kept = self._kept.get(version.name)
        if kept is None or kept.version is not version:
            kept = self._kept[version.name] = ListModel(version)
        return kept

    def _list(self, kind: str) -> dict[str, ServedVersion]:
        served = {name: self._store.get(name) for name in self._store.names}
        return {name: one for name, one in served.items() if one.card["kind"] == kind}

    def _find(self, kind: str, new: ServedVersion | None = None) -> ServedVersion | None:
        """Returns the one model of a kind that answers, with a new version in its place."""
        if kind not in self._kinds:
            return None
        if len(found := self._list(kind)) == 1:
            self._names.setdefault(kind, next(iter(found)))
        if new is not None and new.card["kind"] == kind and (not found or new.name in found):
            found[new.name] = new
        only = next(iter(found)) if len(found) == 1 else ""
        return found.get(self._names.get(kind, only))


def _name(version: ServedVersion) -> str:
    return f"{version.name}, version {version.number}"


def _ask_for_one(kind: str, names: Iterable[str]) -> str:
    option = "--retrieval" if kind == "retrieval" else "--ranker"
    return f"several {kind} models answer: {', '.join(names)}; start the server with {option}"


def explain_no_ranking(ranker: ServedVersion, retrieval: ServedVersion | None) -> str | None:
    """Says why a ranking model cannot order what a retrieval model finds, or else its catalogue."""
    if RANK_ITEMS not in ranker.signatures:
        return f"no signature {RANK_ITEMS}, as {ranker.card['no_item_scores']}"
    if ranker.known is None:
        return "its export holds no items"
    if retrieval is None or retrieval.known is None:
        return None
    name, keys = find_items_input(ranker.card), retrieval.known.keys
    spec = ranker.signatures[RANK_ITEMS].specs[name]
    if keys and isinstance(keys[0], str) != (spec.dtype == tf.string):
        kind = "text" if isinstance(keys[0], str) else "whole numbers"
        return f"its input {name} is {spec.dtype.name}, and keys of {retrieval.name} are {kind}"
    if ranker.known.position_of.keys().isdisjoint(retrieval.known.position_of):
        return f"it knows none of the items of {retrieval.name}"
    return None


class Recommender:
    """Answers `/v1/recommend` by the models that `ListModels` chooses."""

    def __init__(self, models: ListModels, limits: RequestLimits) -> None:
        self._models, self._limits = models, limits

    def describe_inputs(self) -> dict[str, Any]:
        """Returns what a request may say beside the user: inputs that are not stored of users."""
        inputs: dict[str, Any] = {}
        for model in filter(None, self._models.choose()):
            for name, about in model.describe_inputs().items():
                inputs.setdefault(name, about)
        return {"inputs": list(inputs.values())}

    def recommend(self, body: bytes) -> Steps:
        """Returns the body of the answer: retrieve, mask, rank."""
        request = parse_request(parse_json(body, self._limits.values))
        retrieval, ranker = self._models.choose()
        models = [model for model in (retrieval, ranker) if model is not None]
        given = _read_histories(request, models)
        first, known, scores = models[0], models[0].known, {}
        if retrieval is not None:
            vector = yield from self._embed(retrieval, request)
            allowed = find_allowed(first, request, given)
            if known.index is None:
                raise RequestError("the retrieval model has no items")
            k = request.k if ranker is None else max(request.k, request.candidates)
            order, found = known.index.search(vector, min(k, self._limits.pairs), allowed)
            scores["retrieval_score"] = found
        else:
            allowed = find_allowed(first, request, given)
            order = np.flatnonzero(allowed)[: min(CALL_ITEMS, self._limits.pairs)]
        if ranker is not None:
            orders = yield from self._order(ranker, request, known.get_keys(order)[None])
            best = np.argsort(-orders[ranker.engine.task], kind="stable")
            tasks = {f"score:{n}": ranker.engine.finish(n, one) for n, one in orders.items()}
            order, scores = order[best], {n: one[best] for n, one in (tasks | scores).items()}
        items = _describe_items(known, order[: request.k], scores)
        return _describe(request, given, models, items)

    def _embed(self, model: ListModel, request: ListRequest) -> Generator[Call, Arrays, np.ndarray]:
        rows = yield from model.read_row(request, self._limits)

        def embed(given: Arrays) -> Arrays:
            return {"embedding": model.engine.embed(RowInputs(given, rows.is_encoded))}

        signature = rows.name_signature(Give.USER_EMBEDDING)
        found = yield plan_call(model.version, signature, rows.arrays, self._limits, embed)
        return found["embedding"][0]

    def _order(
        self, model: ListModel, request: ListRequest, keys: np.ndarray
    ) -> Generator[Call, Arrays, Arrays]:
        """Returns what the tasks of a ranking model order items by, `[items]` each."""
        rows = yield from model.read_row(request, self._limits)
        name = find_items_input(model.version.card)

        def order(given: Arrays) -> Arrays:
            return model.engine.order_items(RowInputs(given, rows.is_encoded), given[name])

        signature, inputs = rows.name_signature(RANK_ITEMS), {**rows.arrays, name: keys}
        found = yield plan_call(model.version, signature, inputs, self._limits, order)
        return {task: values[0] for task, values in found.items()}


def _read_histories(request: ListRequest, models: Sequence[ListModel]) -> Histories:
    """Returns the histories that a request gives, as the first model that reads each takes it."""
    names = frozenset().union(*(model.allowed for model in models))
    if unknown := [name[:100] for name in request.features if name not in names][:1]:
        raise RequestError(f"unknown features {unknown}; allowed: {', '.join(sorted(names))}")
    found: dict[str, list[Token]] = {}
    for model in reversed(models):
        found |= model.read_histories(request.features)
    return found


def find_allowed(model: ListModel, request: ListRequest, given: Histories) -> np.ndarray:
    """Returns which items may be in a list, `[items]`; `given` and what is stored were met."""
    known, row = model.known, model.find_user(request)
    allowed = known.allowed.copy()
    if request.filter:
        if known.columns is None:
            raise RequestError("'filter' needs an index with columns, or --items FILE")
        try:
            allowed &= known.columns.find(request.filter)
        except WrongFilterError as error:
            raise RequestError(str(error)) from error
    allowed[known.find_keys(request.exclude)] = False
    if request.seen:
        return allowed
    allowed[known.find_keys(chain.from_iterable(given.values()))] = False
    if row is not None and known.users is not None:
        for column in known.users.met:
            allowed[known.find_positions(known.users.read_list(column, row))] = False
    return allowed


def _describe(
    request: ListRequest,
    given: Histories,
    models: Sequence[ListModel],
    items: Sequence[Mapping[str, Any]],
) -> bytes:
    known, row, user = models[0].known, models[0].find_user(request), request.user
    histories = {
        name: describe_history(known, name, row, given.get(name)) for name in models[0].histories
    }
    return encode_json(
        {
            # orjson writes no numbers beyond 64 bits.
            "user": orjson.Fragment(str(user)) if isinstance(user, int) else user,
            "known": row is not None,
            "items": items,
            "history": next(iter(histories.values()), []),
            "histories": histories,
            "models": [_describe_model(model.version) for model in models],
        }
    )


def _describe_items(
    known: KnownEntities, order: np.ndarray, scores: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    described = zip(order, known.get_columns(order), strict=True)
    return [
        {"item": known.keys[position], **{n: one[place] for n, one in scores.items()}, **columns}
        for place, (position, columns) in enumerate(described)
    ]


def describe_history(
    known: KnownEntities, name: str, row: int | None, given: Sequence[Token] | None = None
) -> list[dict[str, Any]]:
    """Returns the items of a user's list: those that a request gives, or else what is stored."""
    if given is not None:
        return _describe_items(known, known.find_keys(given), {})
    if row is None or known.users is None:
        return []
    met = known.users.read_list(f"{FEATURE_PREFIX}{name}", row)
    return _describe_items(known, known.find_positions(met), {})


def _describe_model(version: ServedVersion) -> dict[str, str]:
    about = {"name": version.name, "version": str(version.number)}
    return about if version.index is None else {**about, "index": str(version.index)}
