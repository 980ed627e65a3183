"""Evaluation of a run through what serves it: a SavedModel, or TensorFlow Serving's REST API.

The rows of a split are turned back into raw values, where all features of the model allow it, and
go through the encoders in the graph; else what the records hold goes to the `encoded` signatures.
Each answer is compared with what the trainer computes of the same row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from conf.artefacts.export import Give
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.schema import PAD_ID
from training.apply.answers import EMBEDDING
from training.apply.export import Arrays, Exported
from training.apply.ranker import Ranker, RowInputs
from training.apply.rows import to_array
from training.checkpoint.restore import TrainedModel
from training.encoders.serving import name_inputs
from training.encoders.vocabularies import read_key_vocabulary, read_plan
from training.evaluation.evaluate import evaluate_split
from training.evaluation.tasks import compile_scores
from training.export.signatures import build_encoders
from training.input.batches import Features
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.network import StepContext
from training.other_version import RawRanking, RawTowers

TOLERANCE = 1e-6
SHOWN_ROWS = 5
REQUEST_VALUES = 200_000
"""Most values of a request to an endpoint: ours takes 250,000 with all names and lists."""
AnswerT = TypeVar("AnswerT")
PostJson = Callable[[str, dict[str, Any]], tuple[int, Any]]
"""From a URL and the body to the status and the body of the answer."""


class Endpoint:
    """A model on a server of TensorFlow Serving's REST API.

    `tasks` are the outputs of a ranking model as `export.json` says them; `rows` are those of a
    request, at most.
    """

    def __init__(
        self,
        url: str,
        tasks: Sequence[Mapping[str, Any]] = (),
        post: PostJson | None = None,
        rows: int = 512,
    ) -> None:
        self.card = {"outputs": tasks}
        self._url, self._post, self._rows = url.rstrip("/"), post or post_json, rows
        self._output = tasks[0]["name"] if tasks else EMBEDDING

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature."""
        count = len(next(iter(inputs.values())))
        width = sum(values[:1].size for values in inputs.values())
        rows = max(1, min(self._rows, REQUEST_VALUES // max(1, width)))
        parts = [
            self._ask(signature, {n: v[start : start + rows] for n, v in inputs.items()})
            for start in range(0, count, rows)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _ask(self, signature: str, inputs: Arrays) -> Arrays:
        columns = {name: _to_json(values.tolist()) for name, values in inputs.items()}
        body = {"signature_name": signature, "inputs": columns}
        status, answer = self._post(f"{self._url}:predict", body)
        if status != 200 or not isinstance(answer, dict) or "outputs" not in answer:
            raise UpstreamNotReadyError(
                f"{self._url} does not answer signature {signature!r}",
                received=f"status {status}: {answer}"[:300],
                fix="start a server with the export of this run, and name the model's URL: "
                "http://host:port/v1/models/MODEL",
            )
        outputs = answer["outputs"]
        named = outputs if isinstance(outputs, dict) else {self._output: outputs}
        return {name: np.asarray(value, np.float32) for name, value in named.items()}


def _to_json(value: Any) -> Any:
    """Returns bytes as text, or where they are none as TensorFlow Serving's REST API asks."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def post_json(url: str, body: dict[str, Any], token: str | None = None) -> tuple[int, Any]:
    """Sends JSON over HTTP; returns the status and the JSON of the answer."""
    import requests

    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:  # As text: requests refuses NaN, which stands for missing numbers.
        answer = requests.post(url, data=json.dumps(body), headers=headers, timeout=120)
        return answer.status_code, answer.json()
    except (requests.RequestException, ValueError) as error:
        raise UpstreamNotReadyError("the endpoint does not answer", received=error) from error


@dataclass
class Mismatch:
    """How far answers are from what the trainer computes: by rows of a side, from 1, in order."""

    rows: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    differing: list[tuple[str, int, float]] = field(default_factory=list)

    def add(self, side: str, served: np.ndarray, own: np.ndarray) -> None:
        """Compares answers `[rows, …]`."""
        found = np.abs(served.astype(np.float64) - own).reshape(len(own), -1).max(axis=1)
        found = np.where(np.isnan(found), np.inf, found)
        first = self.rows.get(side, 0) + 1
        self.rows[side] = self.rows.get(side, 0) + len(own)
        self.largest = max(self.largest, float(found.max(initial=0.0)))
        scale = np.maximum(np.abs(own).reshape(len(own), -1).max(axis=1), 1.0)
        for row in np.flatnonzero(found > TOLERANCE * scale):
            self.differing.append((side, first + int(row), float(found[row])))

    def refuse(self) -> None:
        """Refuses answers that are not the trainer's; names the first rows."""
        if self.differing:
            shown = [f"{side} row {row}: {size:.3g}" for side, row, size in self.differing]
            raise InputDataError(
                "what is served does not score as the run does",
                received=f"{len(shown)} rows differ by more than {TOLERANCE:g}: "
                + "; ".join(shown[:SHOWN_ROWS]),
                fix="export this run and checkpoint again, and serve that",
            )


class _Asked:
    """What serves a run, asked for rows of its records; notes how far answers are from its own."""

    def __init__(self, trained: TrainedModel, served: Exported) -> None:
        self.difference, self.ranker = Mismatch(), Ranker(served)
        encoders, where = build_encoders(trained), (trained.version_dir, trained.manifest)
        plan = read_plan(*where)
        self._inputs = {item.feature: item for item in encoders.inputs}
        self._names = name_inputs(dict.fromkeys(self._inputs))
        columns = {name: plan.column(name) for name in trained.model.inputs}
        named = {name: c.vocabulary for name, c in columns.items() if c.vocabulary}
        shared = {name for name, own in named.items() if plan.vocabulary(own).oov_buckets}
        self.encoded = [n for n, c in columns.items() if c.operation is not None or n in shared]
        self._vocabularies = {name: read_key_vocabulary(*where, name) for name in named}

    def ask(
        self, call: Callable[..., AnswerT], features: Features, names: Sequence[str], *more: Any
    ) -> AnswerT:
        """Calls the ranker for rows: raw where all features can be turned back, else encoded."""
        arrays = {name: to_array(features[name]) for name in names}
        if self.encoded:
            rows = RowInputs({self._names[n]: v for n, v in arrays.items()}, is_encoded=True)
        else:
            raw = {self._inputs[n].name: self._decode(n, v) for n, v in arrays.items()}
            rows = RowInputs(raw)
        try:
            return call(rows, *more)
        except KeyError as error:
            raise InputDataError(
                "what serves the model has no such signature or output",
                received=error,
                fix="name the export of this run",
            ) from error

    def _decode(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the raw values that encoded ones were made of; an unknown one is missing."""
        item, vocabulary = self._inputs[name], self._vocabularies.get(name)
        if vocabulary is None:
            return values
        tokens = vocabulary.take(values.ravel()).to_pylist()
        found = np.empty(values.size, object)
        found[:] = [item.null_token if token is None else token for token in tokens]
        if item.is_list:
            found[values.ravel() == PAD_ID] = item.pad_token
        return found.reshape(values.shape).astype(object if item.dtype == "string" else np.int64)


def _build_score(model: RankingModel, asked: _Asked) -> Callable[[Features], dict[str, tf.Tensor]]:
    """Returns what gives the served scores of each task, binary ones as log-odds."""
    predict = compile_scores(model, model.predict)

    def score(features: Features) -> dict[str, tf.Tensor]:
        served = asked.ask(asked.ranker.score, features, model.inputs)
        own, logits = predict(features), {}
        for task in model.tasks:
            asked.difference.add(task.name, served[task.name], np.asarray(own[task.name]))
            found = _find_logits(served[task.name]) if task.is_binary else served[task.name]
            logits[task.name] = tf.constant(found, tf.float32)
        return logits

    return score


def _find_logits(scores: np.ndarray) -> np.ndarray:
    """Returns the log-odds of float32 probabilities, finite where these are 0 or 1."""
    probabilities = np.clip(scores.astype(np.float64), 1e-38, 1.0 - 2.0**-25)
    return np.log(probabilities) - np.log1p(-probabilities)


class ServedTowers(RetrievalModel):
    """A retrieval model whose vectors come from what serves it."""

    def __init__(self, model: RetrievalModel, asked: _Asked) -> None:
        super().__init__(name="served")
        self.user_inputs, self.item_inputs = model.user_inputs, model.item_inputs
        self.temperature, self.tables = model.temperature, {}
        self.interests = model.interests
        self._own, self._asked = model, asked

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns served user vectors, one or several of a row."""
        own = self._own.embed_users({name: features[name] for name in self.user_inputs})
        return self._embed(Give.USER_EMBEDDING, features, own)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns served item vectors `[batch, dim]`."""
        own = self._own.embed_items({name: features[name] for name in self.item_inputs})
        return self._embed(Give.ITEM_EMBEDDING, features, own)

    def _embed(self, give: Give, features: Features, own: tf.Tensor) -> tf.Tensor:
        side, asked = give.split("_")[0], self._asked
        names = self.user_inputs if side == "user" else self.item_inputs
        vectors = asked.ask(asked.ranker.embed, features, names, give)
        asked.difference.add(side, vectors, np.asarray(own))
        return tf.constant(vectors, tf.float32)


def describe_tasks(model: Any) -> list[dict[str, str]]:
    """Returns the outputs of a ranking model as `export.json` says them; none of another one."""
    tasks = model.tasks if isinstance(model, RankingModel) else ()
    return [{"name": task.name, "kind": task.kind} for task in tasks]


def evaluate_served(
    trained: TrainedModel, split: str, served: Exported
) -> tuple[dict[str, Any], Mismatch]:
    """Evaluates a split through what serves the model.

    Returns the metrics with `replay`, what was sent and how far answers are from the trainer's,
    and that as an object.
    """
    model = trained.model
    if isinstance(model, RawRanking | RawTowers):
        raise ConfigError(
            "what serves the run cannot be measured on this version: it has fitted features anew",
            received=trained.manifest.dataset_version,
            fix="measure the run itself there, or what serves it on the version of its own",
        )
    asked = _Asked(trained, served)
    if isinstance(model, RankingModel):
        metrics = evaluate_split(trained, split, score=_build_score(model, asked))
    else:
        towers = ServedTowers(require_retrieval(model), asked)
        metrics = evaluate_split(replace(trained, model=towers), split)
    difference, kept = asked.difference, ", ".join(asked.encoded)
    metrics["replay"] = {
        "sent": f"encoded features: {kept} cannot be turned back" if kept else "raw values",
        "rows": difference.rows,
        "largest_difference": difference.largest,
        "differing_rows": len(difference.differing),
    }
    return metrics, difference
