"""`/v1/recommend`: from a user to a ranked list of items.

The user's features come from the export (`users.parquet`) or the request; a retrieval model finds
items, a ranking model, if there is one, orders them; what the user has met, what is blocked or
asked to be left out, and what a filter does not name is not among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
import tensorflow as tf

from conf.artefacts.export import ENCODED_SUFFIX, FEATURE_PREFIX, RANK_ITEMS, ROW_FEATURES
from training.index.item_columns import Token, WrongFilterError
from training.index.known_entities import KnownEntities
from training.index.vector_index import Found
from training.serving.lists.list_models import ListModels
from training.serving.lists.row_inputs import (
    ROW_SIGNATURES,
    check_features,
    describe_input,
    find_items_input,
    find_row_inputs,
    find_stored,
    find_user_key,
    read_encoded,
    read_given,
    read_raw,
    require_row_features,
)
from training.serving.models.batching import Batcher, Builder
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import ServedVersion
from training.serving.models.server_config import RecommendConfig
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import CALL_ITEMS
from training.serving.requests.recommend_request import RecommendRequest, parse_recommend
from training.serving.requests.tensors import Arrays

Histories = Mapping[str, list[Token]]
"""Keys of items by the feature of their list."""
ITEM_BYTES = 128
"""About so long is an item of the answer."""


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
        self._batcher, self._builder = batcher, builder
        self._models = ListModels(store, config)
        self.check_version = self._models.check_version

    def describe_inputs(self) -> dict[str, Any]:
        """Returns what a request may say beside the user: inputs that are not stored of users.

        Raises:
            RequestError: No model recommends.
        """
        inputs: dict[str, dict[str, Any]] = {}
        for version in filter(None, self._models.choose()):
            users = version.card["users"] or {}
            known = {find_user_key(version)}
            if version.known is not None and version.known.users is not None:
                known |= set(users.get("features", ()))
            for item in find_row_inputs(version, ROW_SIGNATURES[version.card["kind"]]).items:
                if item["feature"] not in known:
                    inputs.setdefault(item["name"], describe_input(item))
        return {"inputs": list(inputs.values())}

    async def recommend(self, data: Mapping[str, Any], size: int) -> bytes:
        """Returns the body of the answer.

        Args:
            data: The request.
            size: Bytes that it came in.

        Raises:
            RequestError: The request is none, or does not fit the models.
        """
        request = await self._builder.run(size, parse_recommend, data)
        retrieval, ranker = self._models.choose()
        models = [model for model in (retrieval, ranker) if model is not None]
        first = models[0]
        known = _require_known(first)
        row = _find_user(known, request)
        await self._builder.run(size, check_features, request, models)
        given = await self._builder.run(size, _read_histories, request, models)
        request = _leave_out_met(request, given)
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
        met = _count_values(known, row, list_histories(first))
        return await self._builder.run(
            size + ITEM_BYTES * (request.k + met), _describe,
            request, known, row, order[: request.k], scores, given, first, ranker,
        )  # fmt: skip

    def _count(self, request: RecommendRequest, ranker: ServedVersion | None) -> int:
        if ranker is None:
            return request.k
        return min(max(request.k, request.candidates), self._batcher.most_candidates)

    def _search(
        self,
        known: KnownEntities,
        request: RecommendRequest,
        row: int | None,
        vector: np.ndarray,
        k: int,
    ) -> Found:
        if known.index is None:
            raise RequestError("the retrieval model has no items")
        return known.index.search(vector, k, self._find_allowed(known, request, row))

    def _find_allowed(
        self, known: KnownEntities, request: RecommendRequest, row: int | None
    ) -> np.ndarray:
        """Returns which items may be in the list, `[items]`."""
        allowed = known.allowed.copy()
        if request.filter:
            if known.columns is None:
                raise RequestError("'filter' needs an index with columns, or --items FILE")
            try:
                allowed &= known.columns.find(request.filter)
            except WrongFilterError as error:
                raise RequestError(str(error)) from error
        allowed[known.find_keys(request.exclude)] = False
        if row is not None and not request.seen and known.users is not None:
            for column in known.users.met:
                allowed[known.find_positions(known.users.read_list(column, row))] = False
        return allowed

    async def _embed(
        self,
        version: ServedVersion,
        known: KnownEntities,
        request: RecommendRequest,
        row: int | None,
        size: int,
    ) -> np.ndarray:
        signature, inputs = await self._read_row(
            version, "user_embedding", known, request, row, size
        )
        outputs = await self._batcher.call(version, signature, inputs)
        return outputs["embedding"][0]

    async def _read_row(
        self,
        version: ServedVersion,
        signature: str,
        known: KnownEntities,
        request: RecommendRequest,
        row: int | None,
        size: int,
    ) -> tuple[str, Arrays]:
        """Returns the signature to call, and what it takes of the row.

        What is stored of a user stands where the request says nothing. It is stored as the records
        hold it, so that what the request says beside it is brought into that form first.
        """
        most = self._batcher.most_values
        stored = await self._builder.run(size, find_stored, version, signature, known, request, row)
        if row is None or not stored:
            return signature, await self._builder.run(
                size, read_raw, version, signature, request, stored, most
            )
        encoded = f"{signature}{ENCODED_SUFFIX}"
        inputs = await self._builder.run(
            8 * _count_values(known, row, stored), read_encoded,
            version, encoded, known, row, stored,
        )  # fmt: skip
        names = find_row_inputs(version, encoded).names
        if others := [name for name in names if name not in inputs]:
            require_row_features(version, others)
            raw = await self._builder.run(
                size, read_raw, version, ROW_FEATURES, request, stored, most
            )
            made = await self._batcher.call(version, ROW_FEATURES, raw)
            inputs |= {name: made[name] for name in others}
        return encoded, inputs

    async def _rank(
        self,
        ranker: ServedVersion,
        known: KnownEntities,
        request: RecommendRequest,
        order: np.ndarray,
        scores: dict[str, np.ndarray],
        size: int,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        own = _require_known(ranker)
        row = _find_user(own, request)
        signature, inputs = await self._read_row(ranker, RANK_ITEMS, own, request, row, size)
        name, spec = find_items_input(ranker, signature)
        inputs[name] = _read_items(known, name, order, spec)
        outputs = await self._batcher.call(ranker, signature, inputs)
        tasks = ranker.card["outputs"]
        best = np.argsort(-outputs[tasks[0]["name"]][0], kind="stable")
        merged = {f"score:{task['name']}": _to_score(task, outputs) for task in tasks} | scores
        return order[best], {name: value[best] for name, value in merged.items()}


def _read_histories(request: RecommendRequest, models: Sequence[ServedVersion]) -> Histories:
    """Returns the histories that a request gives, as the first model that reads each takes it."""
    if not request.features:
        return {}
    found = [read_given(model, request, list_histories(model)) for model in reversed(models)]
    return {name: keys for histories in found for name, keys in histories.items()}


def _leave_out_met(request: RecommendRequest, given: Histories) -> RecommendRequest:
    """Adds what the request says that the user has met to what is left out of the list."""
    if request.seen or not given:
        return request
    return replace(request, exclude=[*request.exclude, *chain.from_iterable(given.values())])


def _read_items(known: KnownEntities, name: str, order: np.ndarray, spec: Any) -> np.ndarray:
    """Returns the keys of items as the ranking model takes them, `[1, items]`."""
    keys = known.get_keys(order)[None]
    if keys.size and (keys.dtype == object) != (spec.dtype == tf.string):
        raise RequestError(f"the ranking model's input {name} is {spec.dtype.name}; keys are not")
    return keys.astype(spec.dtype.as_numpy_dtype, copy=False)


def _to_score(task: Mapping[str, Any], outputs: Arrays) -> np.ndarray:
    """Returns probabilities for a binary task's log-odds, the values of another as they are."""
    order = outputs[task["name"]][0]
    return tf.sigmoid(order).numpy() if task["kind"] == "binary" else order


def _require_known(version: ServedVersion) -> KnownEntities:
    if version.known is None:
        raise RequestError(f"the export of {version.name} holds no items")
    return version.known


def _find_user(known: KnownEntities, request: RecommendRequest) -> int | None:
    if request.user is None or known.users is None:
        return None
    return known.users.row_of.get(str(request.user))


def _count_values(known: KnownEntities, row: int | None, features: Collection[str]) -> int:
    """Returns how many values what is stored of a user has in some features."""
    if row is None or known.users is None:
        return 0
    return known.users.count_values(row, [f"{FEATURE_PREFIX}{name}" for name in features])


def _describe(
    request: RecommendRequest,
    known: KnownEntities,
    row: int | None,
    order: np.ndarray,
    scores: Mapping[str, np.ndarray],
    given: Histories,
    first: ServedVersion,
    ranker: ServedVersion | None,
) -> bytes:
    histories = {
        name: describe_history(known, name, row, given.get(name)) for name in list_histories(first)
    }
    items = [
        {"item": known.keys[position],
         **{name: value[place] for name, value in scores.items()},
         **columns}
        for place, (position, columns) in enumerate(
            zip(order, known.get_columns(order), strict=True))
    ]  # fmt: skip
    models = [m for m in dict.fromkeys((first, ranker)) if m is not None]
    answer = {
        "user": _show_user(request.user),
        "known": row is not None,
        "items": items,
        "history": next(iter(histories.values()), []),
        "histories": histories,
        "models": [_describe_model(model) for model in models],
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _show_user(user: Token | None) -> Any:
    """Returns a user as the request names it; orjson writes no numbers beyond 64 bits."""
    return orjson.Fragment(str(user)) if isinstance(user, int) else user


def list_histories(version: ServedVersion) -> list[str]:
    """Names of the lists that hold what a user did, the main one first."""
    users = version.card["users"] or {}
    earlier = [users["history"]] if users.get("history") else []  # Of exports before several.
    return list(users.get("histories", earlier))


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
    described = zip(met, known.get_columns(met), strict=True)
    return [{"item": known.keys[position], **columns} for position, columns in described]


def _describe_model(model: ServedVersion) -> dict[str, str]:
    about = {"name": model.name, "version": str(model.number)}
    return about if model.index is None else {**about, "index": str(model.index)}
