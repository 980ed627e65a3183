"""Requests that are broken in every way that HTTP lets through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bench.serve.load import Request

VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**31, 2**63, 2**80, -1.5, 1e308, float("nan"), float("inf"), "", "x",
    "\x00", "ü" * 50, "category_0", [], [1], [None], ["x"], [[1], [2, 3]], [[[]]], {},
    {"b64": "eA=="}, {"b64": "?"}, {"b64": 1}, [1] * 300, {"a": {"b": []}},
]  # fmt: skip
METHODS = ["predict", "guess", ""]
FIELDS = ["user", "features", "k", "candidates", "exclude", "filter", "seen", "colour"]


def build_requests(
    cards: Sequence[dict[str, Any]], rng: np.random.Generator, count: int
) -> list[Request]:
    """Draws requests: values of wrong types and shapes, names that are not there, cut text.

    Args:
        cards: `export.json` of the models.
        rng: Source of the draws.
        count: How many.
    """
    return [
        _build_recommend(rng) if rng.random() < 0.4 else _build_call(cards, rng)
        for _ in range(count)
    ]


def _choose(rng: np.random.Generator, among: Sequence[Any]) -> Any:
    return among[int(rng.integers(len(among)))]


def _build_call(cards: Sequence[dict[str, Any]], rng: np.random.Generator) -> Request:
    card = _choose(rng, cards)
    signature = _choose(rng, list(card["signatures"]))
    inputs = card["signatures"][signature]["inputs"]
    row = {item["name"]: _draw_value(item, rng) for item in inputs}
    if rng.random() < 0.3:
        row[_choose(rng, [*row, "colour"])] = _choose(rng, VALUES)
    if rng.random() < 0.1:
        row.pop(_choose(rng, list(row)))
    content = _choose(rng, [[row], [row], [row], row, [row, row], _choose(rng, VALUES)])
    named = _choose(rng, [signature, signature, signature, "none", 3])
    body = {_choose(rng, ["instances", "inputs", "examples"]): content, "signature_name": named}
    model = _choose(rng, [card["name"], card["name"], card["name"], "none", "%00", "a/versions/1"])
    return ("POST", f"/v1/models/{model}:{_choose(rng, METHODS)}", _break(body, rng))


def _draw_value(item: dict[str, Any], rng: np.random.Generator) -> Any:
    if rng.random() < 0.1:
        return _choose(rng, VALUES)
    value: Any = {"string": "F", "int64": 101, "int32": 5}.get(item["dtype"], 0.5)
    return [value] * int(rng.integers(0, 9)) if item.get("is_list") or "means" in item else value


def _build_recommend(rng: np.random.Generator) -> Request:
    user = _choose(rng, ["1003", "nobody", "", "%ff", "-1", "1" * 400])
    if rng.random() < 0.2:
        k, seen = _choose(rng, [1, 0, -1, "x", 1e9]), _choose(rng, ["true", "x", ""])
        return ("GET", f"/v1/recommend?user={user}&k={k}&seen={seen}", None)
    body: dict[str, Any] = {"user": _choose(rng, [1003, user]), "k": 5}
    for name in FIELDS:
        if rng.random() < 0.15:
            body[name] = _choose(rng, VALUES)
    if rng.random() < 0.2:
        body["features"] = {"gender": _choose(rng, VALUES), "history": _choose(rng, VALUES)}
    if rng.random() < 0.2:
        body["filter"] = {"category": _choose(rng, VALUES)}
    return ("POST", "/v1/recommend", _break(body, rng))


def _break(body: dict[str, Any], rng: np.random.Generator) -> Any:
    """Returns a body as it is, or as text that is cut or damaged."""
    if rng.random() < 0.8:
        return body
    text = json.dumps(body)
    cut = int(rng.integers(len(text)))
    return (
        text[:cut]
        + _choose(rng, ["", "\x00", "}", "[" * 2000, "\ud800", "9" * 400])
        + text[cut + 1 :]
    )
