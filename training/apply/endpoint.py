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
from functools import partial
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
from training.encoders.vocabularies import Vocabulary, read_key_vocabulary, read_plan
from training.evaluation.evaluate import evaluate_split
from training.evaluation.task_metrics import compile_scores
from training.export.model_signatures import build_encoders
from training.export.serving_encoders import RawInput, name_inputs
from training.input.batches import Features
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.network import TrainingPass
from training.other_version import RawRanking, RawTowers

TOLERANCE = 1e-6
SHOWN_ROWS = 5
REQUEST_VALUES = 200_000
"""Most values of a request to an endpoint: ours takes 250,000 with all names and lists."""
AnswerT = TypeVar("AnswerT")
PostJson = Callable[[str, dict[str, Any]], tuple[int, Any]]
"""From a URL and the body to the status and the body of the answer."""


class Endpoint:
    """A server of TensorFlow Serving's REST API.

    Args:
        url: That of the model: `http://host:port/v1/models/MODEL`, with a version or without.
        tasks: What `export.json` says of the outputs of a ranking model; none of another one.
        post: Sends a request; None: over HTTP, without a token.
        rows: Rows of a request, at most.
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
        """Returns the outputs of a signature.

        Raises:
            UpstreamNotReadyError: Nothing answers, or another thing than the outputs.
        """
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
    """Sends JSON over HTTP; returns the status and the JSON of the answer.

    Raises:
        UpstreamNotReadyError: Nothing answers, or no JSON.
    """
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
    """How far answers are from what the trainer computes.

    Attributes:
        rows: Rows that were compared, by side.
        largest: The largest difference.
        differing: Side, number (from 1, in the order of the rows that are measured or of the
            catalogue) and difference of rows beyond the tolerance.
    """

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
        """Refuses answers that are not the trainer's.

        Raises:
            InputDataError: Some differ; names the first rows.
        """
        if self.differing:
            shown = [f"{side} row {row}: {size:.3g}" for side, row, size in self.differing]
            raise InputDataError(
                "what is served does not score as the run does",
                received=f"{len(shown)} rows differ by more than {TOLERANCE:g}: "
                + "; ".join(shown[:SHOWN_ROWS]),
                fix="export this run and checkpoint again, and serve that",
            )


class _RowBuilder:
    """Turns features of records into what signatures take: raw values where all can be."""

    def __init__(self, trained: TrainedModel) -> None:
        encoders, plan = build_encoders(trained), read_plan(trained.version_dir, trained.manifest)
        self._inputs = {item.feature: item for item in encoders.inputs}
        self._names = name_inputs(dict.fromkeys(item.feature for item in encoders.inputs))
        columns = {name: plan.column(name) for name in trained.model.inputs}
        named = {name: c.vocabulary for name, c in columns.items() if c.vocabulary}
        self.encoded = tuple(
            name
            for name, column in columns.items()
            if column.operation is not None
            or (name in named and plan.vocabulary(named[name]).oov_buckets)
        )
        where = (trained.version_dir, trained.manifest)
        self._vocabularies = {name: read_key_vocabulary(*where, name) for name in named}

    def build(self, features: Features, names: Sequence[str]) -> RowInputs:
        arrays = {name: to_array(features[name]) for name in names}
        if self.encoded:
            return RowInputs({self._names[n]: v for n, v in arrays.items()}, is_encoded=True)
        items = {name: self._inputs[name] for name in arrays}
        return RowInputs(
            {
                item.name: _decode(arrays[name], item, self._vocabularies.get(name))
                for name, item in items.items()
            }
        )


def _decode(values: np.ndarray, item: RawInput, vocabulary: Vocabulary | None) -> np.ndarray:
    """Returns the raw values that encoded ones were made of; an unknown one is missing."""
    if vocabulary is None:
        return values
    tokens = vocabulary.take(values.ravel()).to_pylist()
    found = np.empty(values.size, object)
    found[:] = [item.null_token if token is None else token for token in tokens]
    if item.is_list:
        found[values.ravel() == PAD_ID] = item.pad_token
    return found.reshape(values.shape).astype(object if item.dtype == "string" else np.int64)


class ServedScores:
    """Scores of a ranking model's tasks from what serves it, in the place of its own logits."""

    def __init__(
        self, model: RankingModel, served: Exported, rows: _RowBuilder, difference: Mismatch
    ) -> None:
        self._model, self._rows, self._difference = model, rows, difference
        self._ranker, self._predict = Ranker(served), compile_scores(model, model.predict)

    def __call__(self, features: Features) -> dict[str, tf.Tensor]:
        """Returns the served scores of each task, binary ones as log-odds."""
        rows = self._rows.build(features, self._model.inputs)
        served = _ask(partial(self._ranker.score, rows))
        own, logits = self._predict(features), {}
        for task in self._model.tasks:
            scores = served[task.name]
            self._difference.add(task.name, scores, np.asarray(own[task.name]))
            found = _find_logits(scores) if task.is_binary else scores
            logits[task.name] = tf.constant(found, tf.float32)
        return logits


def _ask(ask: Callable[[], AnswerT]) -> AnswerT:
    try:
        return ask()
    except KeyError as error:
        raise InputDataError(
            "what serves the model has no such signature or output",
            received=error,
            fix="name the export of this run",
        ) from error


def _find_logits(scores: np.ndarray) -> np.ndarray:
    """Returns the log-odds of float32 probabilities, finite where these are 0 or 1."""
    probabilities = np.clip(scores.astype(np.float64), 1e-38, 1.0 - 2.0**-25)
    return np.log(probabilities) - np.log1p(-probabilities)


class ServedTowers(RetrievalModel):
    """A retrieval model whose vectors come from what serves it."""

    def __init__(
        self, model: RetrievalModel, served: Exported, rows: _RowBuilder, difference: Mismatch
    ) -> None:
        super().__init__(name="served")
        self.user_inputs, self.item_inputs = model.user_inputs, model.item_inputs
        self.temperature, self.tables = model.temperature, {}
        self.interests = model.interests
        self._own, self._ranker = model, Ranker(served)
        self._rows, self._difference = rows, difference

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns served user vectors, one or several of a row."""
        return self._embed(Give.USER_EMBEDDING, self.user_inputs, features)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns served item vectors `[batch, dim]`."""
        return self._embed(Give.ITEM_EMBEDDING, self.item_inputs, features)

    def _embed(self, side: Give, names: Sequence[str], features: Features) -> tf.Tensor:
        rows = self._rows.build(features, names)
        vectors = _ask(partial(self._ranker.embed, rows, side))
        is_user = side is Give.USER_EMBEDDING
        embed = self._own.embed_users if is_user else self._own.embed_items
        own = np.asarray(embed({name: features[name] for name in names}))
        self._difference.add("user" if is_user else "item", vectors, own)
        return tf.constant(vectors, tf.float32)


def describe_tasks(model: Any) -> list[dict[str, str]]:
    """Returns the outputs of a ranking model as `export.json` says them; none of another one."""
    tasks = model.tasks if isinstance(model, RankingModel) else ()
    return [{"name": task.name, "kind": task.kind} for task in tasks]


def evaluate_served(
    trained: TrainedModel, split: str, served: Exported
) -> tuple[dict[str, Any], Mismatch]:
    """Evaluates a split through what serves the model.

    Returns:
        The metrics as `evaluate_split` gives them, with `replay`: what was sent and how far
        answers are from the trainer's; and that as an object.

    Raises:
        ConfigError: The run was put on a version that has fitted features anew.
        InputDataError: Outputs are missing, or the split is damaged.
        UpstreamNotReadyError: The endpoint does not answer.
    """
    model = trained.model
    if isinstance(model, RawRanking | RawTowers):
        raise ConfigError(
            "what serves the run cannot be measured on this version: it has fitted features anew",
            received=trained.manifest.dataset_version,
            fix="measure the run itself there, or what serves it on the version that it was "
            "trained on",
        )
    rows, difference = _RowBuilder(trained), Mismatch()
    if isinstance(model, RankingModel):
        score = ServedScores(model, served, rows, difference)
        metrics = evaluate_split(trained, split, score=score)
    else:
        towers = ServedTowers(require_retrieval(model), served, rows, difference)
        metrics = evaluate_split(replace(trained, model=towers), split)
    metrics["replay"] = {
        "sent": f"encoded features: {', '.join(rows.encoded)} cannot be turned back"
        if rows.encoded
        else "raw values",
        "rows": difference.rows,
        "largest_difference": difference.largest,
        "differing_rows": len(difference.differing),
    }
    return metrics, difference
