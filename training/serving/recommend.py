"""`/v1/recommend`: from a user to a ranked list of items.

The user's features come from the export (`users.parquet`) or the request; a retrieval model finds
items, a ranking model, if there is one, orders them; what the user has met, what is blocked or
asked to be left out, and what a filter does not name is not among them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from conf.errors import ConfigError, InputDataError
from conf.export import EMBEDDINGS_DIR, ITEMS_FILE, USERS_FILE
from training.serving.errors import NOT_FOUND, RequestError
from training.serving.model_store import ModelStore, ServedVersion
from training.serving.tensors import Arrays, build_array

KEY, SEEN, FEATURE_PREFIX = "key", "seen", "feature:"
CALL_ITEMS = 20_000
"""Items that a ranking model scores in one call where nothing retrieves them."""

Call = Callable[[ServedVersion, str, Arrays], Awaitable[Arrays]]
Token = int | str


class RecommendRequest(BaseModel):
    """Body of a request.

    Attributes:
        user: The user's raw key; None: `features` say all.
        features: Raw values by input name; what is left out is missing.
        k: Length of the list.
        candidates: Items that are retrieved for the ranking model.
        exclude: Items that are left out.
        filter: Values that the items file must have, by column.
        seen: Whether items that the user has met may be in the list.
    """

    model_config = ConfigDict(extra="forbid")
    user: int | str | None = None
    features: dict[str, Any] = Field(default_factory=dict)
    k: int = Field(default=10, ge=1, le=1000)
    candidates: int = Field(default=200, ge=1, le=5000)
    exclude: list[int | str] = Field(default_factory=list, max_length=10_000)
    filter: dict[str, int | float | str] = Field(default_factory=dict)
    seen: bool = False


@dataclass(frozen=True)
class RecommendConfig:
    """What answers.

    Attributes:
        retrieval: Name of the retrieval model; None: the only one there is, if any.
        ranker: Name of the ranking model; None: the only one there is, if any.
        items_file: Titles and further columns of the items; the first column is the key.
        blocked_file: Keys of items that are never recommended, one a line.
    """

    retrieval: str | None = None
    ranker: str | None = None
    items_file: Path | None = None
    blocked_file: Path | None = None


@dataclass(frozen=True)
class Known:
    """What an export says of users and items.

    Attributes:
        keys: `[items]` raw keys, in the order of `ids`.
        ids: `[items]` int64, ascending.
        vectors: `[items, dim]` of a retrieval model, else None.
        position_of: Position of each key, by its text.
        users: The users, or None.
        user_of: Row of each user, by the text of its key.
    """

    keys: list[Token]
    ids: np.ndarray
    vectors: np.ndarray | None
    position_of: dict[str, int]
    users: pa.Table | None = None
    user_of: dict[str, int] = field(default_factory=dict)


def read_known(version: ServedVersion) -> Known:
    """Reads what stands beside a SavedModel."""
    beside = version.path / EMBEDDINGS_DIR / ITEMS_FILE
    table = pq.read_table(beside if beside.is_file() else version.path / ITEMS_FILE)
    keys = table[KEY].to_pylist()
    vectors = None
    if "vector" in table.column_names:
        flat = table["vector"].combine_chunks()
        vectors = flat.flatten().to_numpy().reshape(len(keys), -1)
    users, user_of = None, {}
    if (version.path / USERS_FILE).is_file():
        users = pq.read_table(version.path / USERS_FILE)
        user_of = {str(key): row for row, key in enumerate(users[KEY].to_pylist())}
    ids = table["id"].to_numpy()
    return Known(keys, ids, vectors, {str(key): n for n, key in enumerate(keys)}, users, user_of)


class ItemsFile:
    """Titles and further columns of items, for people and for filters.

    Args:
        path: `.csv`, `.tsv`, `.jsonl` or `.parquet`; the first column is the key.

    Raises:
        ConfigError: The format is not known by the name.
        InputDataError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        table = _read_table(path)
        names = table.column_names
        self.columns = tuple(names[1:])
        self._rows = {
            str(row[names[0]]): {name: _clean(row[name]) for name in self.columns}
            for row in table.to_pylist()
        }

    def get(self, key: Token) -> dict[str, Any]:
        """Returns the columns of an item; none: it is not in the file."""
        return self._rows.get(str(key), {})

    def find(self, wanted: Mapping[str, Any]) -> set[str]:
        """Returns the keys, as text, of items that have these values.

        Raises:
            RequestError: There is no such column.
        """
        unknown = sorted(set(wanted) - set(self.columns))
        if unknown:
            raise RequestError(
                f"filter names unknown columns {unknown}; allowed: {', '.join(self.columns)}"
            )
        texts = {name: str(value) for name, value in wanted.items()}
        return {
            key for key, row in self._rows.items()
            if all(_holds(row[name], text) for name, text in texts.items())
        }  # fmt: skip


def _clean(value: Any) -> Any:
    """Returns a value as JSON knows it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def _holds(value: Any, text: str) -> bool:
    values = value if isinstance(value, list) else str(value).split("|")
    return text == str(value) or text in map(str, values)


def _read_table(path: Path) -> pa.Table:
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return pq.read_table(path)
        if kind in (".jsonl", ".ndjson"):
            return pa_json.read_json(path)
        if kind in (".csv", ".tsv"):
            delimiter = "\t" if kind == ".tsv" else ","
            parse = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
            return pa_csv.read_csv(path, parse_options=parse)
    except (OSError, pa.ArrowException) as error:
        raise InputDataError("the file of items cannot be read", received=f"{path}: {error}") from (
            error
        )
    raise ConfigError(
        "the format of the items is not known by the file's name",
        received=str(path),
        allowed=".csv, .tsv, .jsonl, .parquet",
    )


class Recommender:
    """Answers `/v1/recommend`.

    Args:
        store: The models.
        call: Calls a signature.
        config: What answers.

    Raises:
        ConfigError: A named model is not there, or of the other kind.
    """

    def __init__(self, store: ModelStore, call: Call, config: RecommendConfig) -> None:
        self._store, self._call, self._config = store, call, config
        self._items = None if config.items_file is None else ItemsFile(config.items_file)
        self._blocked = _read_blocked(config.blocked_file)
        self._known: dict[str, tuple[ServedVersion, Known]] = {}
        self._lock = threading.Lock()
        for name, kind in ((config.retrieval, "retrieval"), (config.ranker, "ranking")):
            if name is not None and name not in self._list(kind):
                raise ConfigError(
                    f"there is no exported {kind} model of that name",
                    received=name,
                    allowed=", ".join(self._list(kind)) or "none",
                )

    def _list(self, kind: str) -> list[str]:
        return [n for n in self._store.names if self._store.get(n).card["kind"] == kind]

    def _choose(self, kind: str, name: str | None) -> ServedVersion | None:
        names = [name] if name is not None else self._list(kind)
        if len(names) > 1:
            raise RequestError(
                f"several {kind} models answer: {', '.join(names)}; "
                f"start the server with --{'retrieval' if kind == 'retrieval' else 'ranker'}"
            )
        return self._store.get(names[0]) if names else None

    def load(self, version: ServedVersion) -> Known:
        """Returns what is known of users and items; read once per version."""
        with self._lock:
            found = self._known.get(version.name)
            if found is None or found[0] is not version:
                found = (version, read_known(version))
                self._known[version.name] = found
            return found[1]

    async def recommend(self, request: RecommendRequest) -> dict[str, Any]:
        """Returns the body of the answer.

        Raises:
            RequestError: The request does not fit the models.
        """
        retrieval = self._choose("retrieval", self._config.retrieval)
        ranker = self._choose("ranking", self._config.ranker)
        if ranker is not None and "score_items" not in ranker.signatures:
            ranker = None
        first = retrieval or ranker
        if first is None:
            raise RequestError("no model of the server recommends items", NOT_FOUND)
        known = self.load(first)
        row = None if request.user is None else known.user_of.get(str(request.user))
        _check_features(request, [model for model in (retrieval, ranker) if model is not None])
        allowed = self._find_allowed(known, request, row)
        scores: dict[str, np.ndarray] = {}
        if retrieval is not None:
            vectors = await self._embed(retrieval, known, request, row)
            order, scores["retrieval_score"] = _search(
                known, vectors, allowed, _count(request, ranker)
            )
        else:
            order = np.flatnonzero(allowed)[:CALL_ITEMS]
        if ranker is not None:
            order, scores = await self._rank(ranker, known, request, order, scores)
        return self._describe(request, known, row, order[: request.k], scores, first, ranker)

    def _find_allowed(self, known: Known, request: RecommendRequest, row: int | None) -> np.ndarray:
        allowed = np.ones(len(known.keys), bool)
        for key in (*request.exclude, *self._blocked):
            if (position := known.position_of.get(str(key))) is not None:
                allowed[position] = False
        if row is not None and not request.seen and known.users is not None:
            allowed[_find_positions(known, _read_list(known.users, SEEN, row))] = False
        if request.filter:
            if self._items is None:
                raise RequestError("'filter' needs a server with --items FILE")
            named = self._items.find(request.filter)
            allowed &= np.array([str(key) in named for key in known.keys])
        return allowed

    async def _embed(
        self, version: ServedVersion, known: Known, request: RecommendRequest, row: int | None
    ) -> np.ndarray:
        if row is not None and not request.features:
            inputs = _encoded_inputs(version, "user_embedding_encoded", known, row)
            found = await self._call(version, "user_embedding_encoded", inputs)
        else:
            inputs = _raw_inputs(version, "user_embedding", request)
            found = await self._call(version, "user_embedding", inputs)
        return found["embedding"][0]

    async def _rank(
        self,
        ranker: ServedVersion,
        known: Known,
        request: RecommendRequest,
        order: np.ndarray,
        scores: dict[str, np.ndarray],
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        own = self.load(ranker)
        row = None if request.user is None else own.user_of.get(str(request.user))
        signature = "score_items"
        if row is not None and not request.features:
            signature = "score_items_encoded"
            _require_users_alone(ranker)
            inputs = _encoded_inputs(ranker, signature, own, row)
        else:
            inputs = _raw_inputs(ranker, signature, request)
        name, spec = _find_items_input(ranker, signature)
        inputs[name] = build_array(name, [[known.keys[n] for n in order]], spec)
        found = await self._call(ranker, signature, inputs)
        names = [output["name"] for output in ranker.card["outputs"]]
        tasks = {f"score:{task}": found[task][0] for task in names}
        best = np.argsort(-found[names[0]][0], kind="stable")
        merged = {**tasks, **scores}
        return order[best], {name: value[best] for name, value in merged.items()}

    def _describe(
        self,
        request: RecommendRequest,
        known: Known,
        row: int | None,
        order: np.ndarray,
        scores: Mapping[str, np.ndarray],
        first: ServedVersion,
        ranker: ServedVersion | None,
    ) -> dict[str, Any]:
        history: list[Token] = []
        name = (first.card["users"] or {}).get("history")
        if row is not None and name is not None and known.users is not None:
            ids = _read_list(known.users, f"{FEATURE_PREFIX}{name}", row)
            history = [known.keys[n] for n in _find_positions(known, ids)]
        items = [
            {"item": known.keys[n],
             **{name: float(str(value[place])) for name, value in scores.items()},
             **self._get_columns(known.keys[n])}
            for place, n in enumerate(order)
        ]  # fmt: skip
        models = [m for m in dict.fromkeys((first, ranker)) if m is not None]
        return {
            "user": request.user,
            "known": row is not None,
            "items": items,
            "history": [{"item": key, **self._get_columns(key)} for key in history],
            "models": [{"name": m.name, "version": str(m.number)} for m in models],
        }

    def _get_columns(self, key: Token) -> dict[str, Any]:
        return {} if self._items is None else self._items.get(key)


def _count(request: RecommendRequest, ranker: ServedVersion | None) -> int:
    return request.k if ranker is None else max(request.k, request.candidates)


def _read_blocked(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        return tuple(filter(None, path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise InputDataError("the file of blocked items cannot be read", received=error) from error


def _search(
    known: Known, vector: np.ndarray, allowed: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of the best items and their scores, best first, ties by id."""
    if known.vectors is None:
        raise RequestError("the retrieval model has no items")
    scores = np.where(allowed, known.vectors @ vector, -np.inf)
    k = min(k, int(np.count_nonzero(allowed)))
    if k == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    candidates = np.flatnonzero(scores >= least)
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return order, scores[order]


def _read_list(users: pa.Table, column: str, row: int) -> np.ndarray:
    if column not in users.column_names:
        return np.zeros(0, np.int64)
    values = users[column].slice(row, 1).combine_chunks()
    return np.asarray(pc.list_flatten(values).to_numpy(zero_copy_only=False))


def _find_positions(known: Known, ids: np.ndarray) -> np.ndarray:
    """Returns the positions of items; unknown ones are left out."""
    found = np.minimum(np.searchsorted(known.ids, ids), len(known.ids) - 1)
    return found[known.ids[found] == ids]


def _describe_inputs(version: ServedVersion, signature: str) -> Sequence[Mapping[str, Any]]:
    inputs: Sequence[Mapping[str, Any]] = version.card["signatures"][signature]["inputs"]
    return inputs


def _find_items_input(version: ServedVersion, signature: str) -> tuple[str, Any]:
    name = next(i["name"] for i in _describe_inputs(version, signature) if "means" in i)
    return name, version.find_specs(signature)[name]


def _require_users_alone(version: ServedVersion) -> None:
    features = set((version.card["users"] or {}).get("features", ()))
    inputs = _describe_inputs(version, "score_items_encoded")
    others = [i["name"] for i in inputs if "means" not in i and i["feature"] not in features]
    if others:
        raise RequestError(
            f"{version.name} reads {', '.join(others)} of the request: give all that it reads of a "
            "row in 'features'"
        )


def _encoded_inputs(version: ServedVersion, signature: str, known: Known, row: int) -> Arrays:
    if known.users is None:
        raise RequestError("the export holds no users")
    specs, inputs = version.find_specs(signature), {}
    user = known.users.slice(row, 1)
    for item in _describe_inputs(version, signature):
        if "means" not in item:
            value = user[f"{FEATURE_PREFIX}{item['feature']}"].to_pylist()
            inputs[item["name"]] = build_array(item["name"], value, specs[item["name"]])
    return inputs


def _raw_inputs(version: ServedVersion, signature: str, request: RecommendRequest) -> Arrays:
    """Returns one row of raw values; what the request leaves out is missing."""
    about = [item for item in _describe_inputs(version, signature) if "means" not in item]
    key = (version.card["users"] or {}).get("key")
    specs, inputs = version.find_specs(signature), {}
    for item in about:
        value = request.features.get(item["name"])
        if value is None and item["feature"] == key:
            value = _read_key(request.user, item)
        inputs[item["name"]] = build_array(item["name"], [_fill(item, value)], specs[item["name"]])
    return inputs


def _check_features(request: RecommendRequest, models: Sequence[ServedVersion]) -> None:
    if request.user is None and not request.features:
        raise RequestError("a request needs 'user', 'features', or both")
    signatures = {"retrieval": "user_embedding", "ranking": "score_items"}
    names = {
        item["name"]
        for model in models
        for item in _describe_inputs(model, signatures[model.card["kind"]])
        if "means" not in item
    }
    unknown = sorted(set(request.features) - names)
    if unknown:
        raise RequestError(f"unknown features {unknown}; allowed: {', '.join(sorted(names))}")


def _read_key(user: Token | None, item: Mapping[str, Any]) -> Token | None:
    if user is None or item["dtype"] == "string":
        return None if user is None else str(user)
    try:
        return int(user)
    except ValueError:
        return None  # Text where users are numbers: nobody whom the model knows.


def _fill(item: Mapping[str, Any], value: Any) -> Any:
    if value is not None:
        return value
    if item["is_list"]:
        return [item["pad_token"]] * (item["length"] or 1)
    if item["null_token"] is not None:
        return item["null_token"]
    if item["dtype"] in ("float32", "float64"):
        return float("nan")
    raise RequestError(f"feature {item['name']} has no value for 'missing': give it")
