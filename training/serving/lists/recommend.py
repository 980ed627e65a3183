"""`/v1/recommend`: from a user to a ranked list of items.

The user's features come from the export (`users.parquet`) or the request; a retrieval model finds
items, a ranking model, if there is one, orders them; what the user has met, what is blocked or
asked to be left out, and what a filter does not name is not among them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from conf.artefacts.export import FEATURE_PREFIX, RANK_ITEMS, Give
from training.apply.ranker import RowInputs, find_items_input
from training.evaluation.item_index import ItemIds, find_cells
from training.index.item_columns import Token, WrongFilterError
from training.index.known_entities import KnownEntities
from training.index.vector_index import Found
from training.serving.lists.list_models import ListModels
from training.serving.lists.row_inputs import ListModel, check_features
from training.serving.models.batching import Call, Steps, plan_call
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import RecommendConfig
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import CALL_ITEMS, RequestLimits
from training.serving.requests.recommend_request import RecommendRequest, parse_recommend
from training.serving.requests.tensors import Arrays, encode_json, parse_json

Histories = Mapping[str, list[Token]]
"""Keys of items by the feature of their list."""


class Recommender:
    """Answers `/v1/recommend`; arguments and errors are those of `ListModels`."""

    def __init__(self, store: ModelStore, config: RecommendConfig, limits: RequestLimits) -> None:
        self._models, self._limits = ListModels(store, config), limits
        self.check_version = self._models.check_version

    def describe_inputs(self) -> dict[str, Any]:
        """Returns what a request may say beside the user: inputs that are not stored of users."""
        inputs: dict[str, Any] = {}
        for model in filter(None, self._models.choose()):
            for name, about in model.describe_inputs().items():
                inputs.setdefault(name, about)
        return {"inputs": list(inputs.values())}

    def recommend(self, body: bytes) -> Steps:
        """Returns the body of the answer.

        Raises:
            RequestError: The request is none, or does not fit the models.
        """
        request = parse_recommend(parse_json(body, self._limits.values))
        retrieval, ranker = self._models.choose()
        models = [model for model in (retrieval, ranker) if model is not None]
        check_features(request, models)
        given: dict[str, list[Token]] = {}
        for model in reversed(models):
            given |= model.read_histories(model.name_given(request.features))
        scores: dict[str, np.ndarray] = {}
        if retrieval is not None:
            vector = yield from self._embed(retrieval, request)
            k = request.k if ranker is None else max(request.k, request.candidates)
            order, scores["retrieval_score"] = _search(
                models[0], request, given, vector, min(k, self._limits.pairs)
            )
        else:
            allowed = find_allowed(models[0], request, given)
            order = np.flatnonzero(allowed)[: min(CALL_ITEMS, self._limits.pairs)]
        if ranker is not None:
            order, scores = yield from self._rank(ranker, models[0].known, request, order, scores)
        items = _describe_items(models[0].known, order[: request.k], scores)
        return _describe(models, request, given, items)

    def _embed(
        self, model: ListModel, request: RecommendRequest
    ) -> Generator[Call, Arrays, np.ndarray]:
        rows = yield from model.read_row(request, self._limits)

        def embed(given: Arrays) -> Arrays:
            return {"embedding": model.engine.embed(RowInputs(given, rows.is_encoded))}

        signature = rows.name_signature(Give.USER_EMBEDDING)
        found = yield plan_call(model.version, signature, rows.arrays, self._limits, embed)
        return found["embedding"][0]

    def _rank(
        self,
        model: ListModel,
        known: KnownEntities,
        request: RecommendRequest,
        order: np.ndarray,
        scores: Mapping[str, np.ndarray],
    ) -> Generator[Call, Arrays, tuple[np.ndarray, dict[str, np.ndarray]]]:
        rows = yield from model.read_row(request, self._limits)
        name = find_items_input(model.version.card)

        def score(given: Arrays) -> Arrays:
            return model.engine.order_items(RowInputs(given, rows.is_encoded), given[name])

        inputs = {**rows.arrays, name: known.get_keys(order)[None]}
        signature = rows.name_signature(RANK_ITEMS)
        orders = yield plan_call(model.version, signature, inputs, self._limits, score)
        best = np.argsort(-orders[model.engine.task][0], kind="stable")
        tasks = {f"score:{task}": model.engine.finish(task, found[0])
                 for task, found in orders.items()}  # fmt: skip
        return order[best], {name: found[best] for name, found in {**tasks, **scores}.items()}


def _search(
    model: ListModel,
    request: RecommendRequest,
    given: Histories,
    vector: np.ndarray,
    k: int,
) -> Found:
    if model.known.index is None:
        raise RequestError("the retrieval model has no items")
    return model.known.index.search(vector, k, find_allowed(model, request, given))


def find_allowed(model: ListModel, request: RecommendRequest, given: Histories) -> np.ndarray:
    """Returns which items may be in a list, `[items]`.

    Args:
        model: What knows the items.
        request: Says what is left out.
        given: What the request says that the user has met; beside it what is stored counts.
    """
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
            met = known.users.read_list(column, row)
            allowed[find_cells(np.array([len(met)]), met, ItemIds(known.ids)).columns] = False
    return allowed


def _describe(
    models: Sequence[ListModel],
    request: RecommendRequest,
    given: Histories,
    items: Sequence[Mapping[str, Any]],
) -> bytes:
    known, row = models[0].known, models[0].find_user(request)
    histories = {
        name: describe_history(known, name, row, given.get(name)) for name in models[0].histories
    }
    return encode_json(
        {
            "user": _show_user(request.user),
            "known": row is not None,
            "items": items,
            "history": next(iter(histories.values()), []),
            "histories": histories,
            "models": [_describe_model(model.version) for model in models],
        }
    )


def _show_user(user: Token | None) -> Any:
    """Returns a user as the request names it; orjson writes no numbers beyond 64 bits."""
    return orjson.Fragment(str(user)) if isinstance(user, int) else user


def _describe_items(
    known: KnownEntities, order: np.ndarray, scores: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    described = zip(order, known.get_columns(order), strict=True)
    return [
        {"item": known.keys[position], **{n: v[place] for n, v in scores.items()}, **columns}
        for place, (position, columns) in enumerate(described)
    ]


def describe_history(
    known: KnownEntities, name: str, row: int | None, given: Sequence[Token] | None = None
) -> list[dict[str, Any]]:
    """Returns the items of a user's list that the export holds.

    Args:
        known: What the export holds.
        name: Feature of the list.
        row: The user's; None: nothing is stored of the user.
        given: Keys that the request gives in the place of what is stored; None: it gives none.
    """
    if given is not None:
        met = known.find_keys(given)
    elif row is None or known.users is None:
        return []
    else:
        met = known.find_positions(known.users.read_list(f"{FEATURE_PREFIX}{name}", row))
    return _describe_items(known, met, {})


def _describe_model(version: ServedVersion) -> dict[str, str]:
    about = {"name": version.name, "version": str(version.number)}
    return about if version.index is None else {**about, "index": str(version.index)}
