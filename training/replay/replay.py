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
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from conf.artefacts.export import DEFAULT_SIGNATURE, ENCODED, ENCODED_SUFFIX
from conf.encoders import EncoderPlan
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.task_metrics import compile_scores
from training.export.serving_encoders import RawInput, name_inputs
from training.export.signatures import build_encoders
from training.input.batches import Features
from training.loading.loaded_model import LoadedModel
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.networks.network import TrainingPass
from training.raw_inputs.vocabularies import Vocabulary, read_plan, read_vocabulary
from training.replay.own_encoders import RawRanking, RawTowers

TOLERANCE = 1e-6
SHOWN_ROWS = 5

Arrays = dict[str, np.ndarray]
PostJson = Callable[[str, dict[str, Any]], tuple[int, Any]]
"""From a URL and the body to the status and the body of the answer."""


class Served(Protocol):
    """What answers requests."""

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature."""
        ...


class LoadedVersion:
    """A version on disk.

    Args:
        version: Its directory.
    """

    def __init__(self, version: Path) -> None:
        self._model = LoadedModel(version)

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature.

        Raises:
            InputDataError: The SavedModel does not have it.
        """
        if signature not in self._model.signatures:
            raise _refuse_output(f"signature {signature}", self._model.signatures)
        return self._model.call(signature, inputs)


REQUEST_VALUES = 200_000
"""Most values of a request to an endpoint: ours takes 250,000 with all names and lists."""


class Endpoint:
    """A server of TensorFlow Serving's REST API.

    Args:
        url: That of the model: `http://host:port/v1/models/MODEL`, with a version or without.
        post: Sends a request; None: over HTTP, without a token.
        rows: Rows of a request, at most.
    """

    def __init__(self, url: str, post: PostJson | None = None, rows: int = 512) -> None:
        self._url, self._post, self._rows = url.rstrip("/"), post or post_json, rows

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
        columns = {name: _to_json(values) for name, values in inputs.items()}
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
        named = outputs if isinstance(outputs, dict) else {"": outputs}
        return {name: np.asarray(value, np.float32) for name, value in named.items()}


def _to_json(values: np.ndarray) -> Any:
    if values.dtype != object:
        return values.tolist()
    return [_encode_bytes(value) for value in values.tolist()]


def _encode_bytes(value: Any) -> Any:
    """Returns bytes as text, or where they are none as TensorFlow Serving's REST API asks."""
    if isinstance(value, list):
        return [_encode_bytes(item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def post_json(url: str, body: dict[str, Any], token: str | None = None) -> tuple[int, Any]:
    """Sends JSON over HTTP.

    Args:
        url: Where to.
        body: What is sent; NaN stands for missing numbers.
        token: What the server asks for as `Authorization: Bearer …`, or None.

    Returns:
        The status, and the JSON of the answer.

    Raises:
        UpstreamNotReadyError: Nothing answers, or no JSON.
    """
    import requests

    try:
        # As text: requests refuses NaN.
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
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


class _Replay:
    """Sends features of the records to what serves them."""

    def __init__(self, trained: TrainedModel, served: Served) -> None:
        self.difference = Mismatch()
        self._served = served
        encoders = build_encoders(trained)
        self._inputs = {item.feature: item for item in encoders.inputs}
        self._names = name_inputs(dict.fromkeys(item.feature for item in encoders.inputs))
        plan = read_plan(trained.version_dir, trained.manifest)
        self.encoded = tuple(n for n in trained.model.inputs if not _is_reversible(plan, n))
        self._vocabularies = _read_vocabularies(trained, plan)

    def ask(self, signature: str, features: Mapping[str, np.ndarray]) -> Arrays:
        """Returns the outputs for rows: raw where all features can be, else encoded."""
        if self.encoded:
            given = {self._names[name]: value for name, value in features.items()}
            return self._served.call(_name_encoded(signature), given)
        raw = {
            self._inputs[name].name: _decode(
                value, self._inputs[name], self._vocabularies.get(name)
            )
            for name, value in features.items()
        }
        return self._served.call(signature, raw)


def _name_encoded(signature: str) -> str:
    return ENCODED if signature == DEFAULT_SIGNATURE else f"{signature}{ENCODED_SUFFIX}"


def _is_reversible(plan: EncoderPlan, name: str) -> bool:
    column = plan.column(name)
    if column.operation is not None:
        return False
    return column.vocabulary is None or not plan.vocabulary(column.vocabulary).oov_buckets


def _read_vocabularies(trained: TrainedModel, plan: EncoderPlan) -> dict[str, Vocabulary]:
    used = {name: plan.column(name).vocabulary for name in trained.model.inputs}
    read = {
        vocabulary: read_vocabulary(trained.version_dir, plan.vocabulary(vocabulary))
        for vocabulary in set(filter(None, used.values()))
    }
    return {name: read[vocabulary] for name, vocabulary in used.items() if vocabulary}


def _decode(values: np.ndarray, item: RawInput, vocabulary: Vocabulary | None) -> np.ndarray:
    """Returns the raw values that encoded ones were made of; an unknown one is missing."""
    if vocabulary is None:
        return values
    tokens = vocabulary.take(values.ravel()).to_pylist()
    null = item.null_token
    found = np.empty(values.size, object)
    found[:] = [null if token is None else token for token in tokens]
    if item.is_list:
        found[values.ravel() == PAD_ID] = item.pad_token
    kind = object if item.dtype == "string" else np.int64
    return found.reshape(values.shape).astype(kind)


class ServedScores:
    """Scores of a ranking model's tasks from what serves it, in the place of its own logits.

    Args:
        model: The trained model, to compare with.
        replay: What is asked.
    """

    def __init__(self, model: RankingModel, replay: _Replay) -> None:
        self._model, self._replay = model, replay
        self._predict = compile_scores(model, model.predict)

    def __call__(self, features: Features) -> dict[str, tf.Tensor]:
        """Returns the served scores of each task, binary ones as log-odds."""
        dense = {name: _to_dense(features[name]).numpy() for name in self._model.inputs}
        served = self._replay.ask(DEFAULT_SIGNATURE, dense)
        own, logits = self._predict(features), {}
        for task in self._model.tasks:
            scores = served.get(task.name, served.get(""))
            if scores is None:
                raise _refuse_output(task.name, served)
            self._replay.difference.add(task.name, scores, np.asarray(own[task.name]))
            found = _find_logits(scores) if task.is_binary else scores
            logits[task.name] = tf.constant(found, tf.float32)
        return logits


def _find_logits(scores: np.ndarray) -> np.ndarray:
    """Returns the log-odds of float32 probabilities, finite where these are 0 or 1."""
    probabilities = np.clip(scores.astype(np.float64), 1e-38, 1.0 - 2.0**-25)
    return np.log(probabilities) - np.log1p(-probabilities)


class ReplayedTowers(RetrievalModel):
    """A retrieval model whose vectors come from what serves it; arguments as `ServedScores`."""

    def __init__(self, model: RetrievalModel, replay: _Replay) -> None:
        super().__init__(name="replayed")
        self.user_inputs, self.item_inputs = model.user_inputs, model.item_inputs
        self.temperature, self.tables = model.temperature, {}
        self.interests = model.interests
        self._own, self._replay = model, replay

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns served user vectors, one or several of a row."""
        return self._embed("user", self.user_inputs, features, self._own.embed_users)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns served item vectors `[batch, dim]`."""
        return self._embed("item", self.item_inputs, features, self._own.embed_items)

    def _embed(
        self,
        side: str,
        names: Sequence[str],
        features: Features,
        embed: Callable[[Features], tf.Tensor],
    ) -> tf.Tensor:
        given = {name: _to_dense(features[name]).numpy() for name in names}
        found = self._replay.ask(f"{side}_embedding", given)
        vectors = found.get("embedding", found.get(""))
        if vectors is None:
            raise _refuse_output("embedding", found)
        own = embed({name: features[name] for name in names})
        self._replay.difference.add(side, vectors, np.asarray(own))
        return tf.constant(vectors, tf.float32)


def _to_dense(values: Any) -> tf.Tensor:
    return (
        values.to_tensor() if isinstance(values, tf.RaggedTensor) else tf.convert_to_tensor(values)
    )


def _refuse_output(name: str, found: Mapping[str, Any]) -> InputDataError:
    return InputDataError(
        "what serves the model gives other outputs",
        received=", ".join(found),
        allowed=name,
        fix="name the export of this run",
    )


def replay_split(
    trained: TrainedModel, split: str, served: Served
) -> tuple[dict[str, Any], Mismatch]:
    """Evaluates a split through what serves the model.

    Args:
        trained: The run's model.
        split: The split.
        served: What serves it.

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
            fix="measure the run itself there, without --served or --endpoint; or what serves it "
            "on the version that it was trained on",
        )
    replay = _Replay(trained, served)
    if isinstance(model, RankingModel):
        metrics = evaluate_split(trained, split, score=ServedScores(model, replay))
    else:
        towers = ReplayedTowers(require_retrieval(model), replay)
        metrics = evaluate_split(replace(trained, model=towers), split)
    difference = replay.difference
    sent = "raw values"
    if replay.encoded:
        sent = f"encoded features: {', '.join(replay.encoded)} cannot be turned back"
    metrics["replay"] = {
        "sent": sent,
        "rows": difference.rows,
        "largest_difference": difference.largest,
        "differing_rows": len(difference.differing),
    }
    return metrics, difference


def refuse_differences(difference: Mismatch) -> None:
    """Refuses answers that are not the trainer's.

    Raises:
        InputDataError: Some differ; names the first rows.
    """
    if difference.differing:
        shown = "; ".join(
            f"{side} row {row}: {size:.3g}" for side, row, size in difference.differing[:SHOWN_ROWS]
        )
        raise InputDataError(
            "what is served does not score as the run does",
            received=f"{len(difference.differing)} rows differ by more than {TOLERANCE:g}: {shown}",
            fix="export this run and checkpoint again, and serve that",
        )
