"""A version of a model that is served: checked to be what was exported, loaded, warmed up, called.

Its answers are checked, too.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from conf.artefacts.export import (
    ENCODED,
    EXPORT_FILE,
    WARMUP_FILE,
    find_damage,
    find_damaged,
    is_sealed,
    read_card,
)
from conf.errors import InputDataError
from training.index.item_columns import NO_FILES, ItemFiles
from training.index.known_entities import IncompleteVersionError, read_known
from training.loading.loaded_model import LoadedModel
from training.serving.requests.errors import (
    FAILED,
    SEARCHED_CHARACTERS,
    RequestError,
    hide_folders,
)
from training.serving.requests.limits import SignatureCost
from training.serving.requests.tensors import Arrays, check_examples

_AROUND = re.compile(r"Graph execution error|Detected at node|\s*File |<stack traces|\s")


_KIND_SIGNATURES = {"retrieval": "user_embedding", "ranking": ENCODED}
"""A signature that all models of a kind have, and those of no other."""
CHECKED_AT_ONCE = 1 << 22
"""Weights that are looked at in one go."""


@dataclass(frozen=True)
class Loading:
    """How versions are loaded.

    Attributes:
        files: What else is said of the items; None: nothing is read of users and items.
        verify: Whether the SHA-256 of each file is compared first.
        pages: Directory of what processes share; None: this one has all for itself.
    """

    files: ItemFiles | None = NO_FILES
    verify: bool = True
    pages: Path | None = None


USUAL_LOADING = Loading()


class ServedVersion:
    """A loaded version of a model, and what is known of its users and items.

    Args:
        path: Its directory.
        loading: How it is loaded.

    Attributes:
        name: Name of the model.
        number: Its version.
        card: What `export.json` says.
        path: Its directory.
        known: Its users, items and index; None: it knows no items, or they were not read.

    Raises:
        IncompleteVersionError: It, or its index, is not whole.
        SluiceError: `export.json` or a file is damaged, or says another thing than the SavedModel;
            or the index is of another model.
    """

    def __init__(self, path: Path, loading: Loading = USUAL_LOADING) -> None:
        self.path, self.name, self.number = path, path.parent.name, int(path.name)
        self.card = read_card(path)
        if damage := find_damage(path):
            raise IncompleteVersionError(damage)
        if loading.verify:
            _check_files(path, self.card)
        self._files = loading.files or NO_FILES
        pages = None if loading.pages is None else _name_pages(loading.pages, path, self.card)
        self.known = None
        if loading.files is not None:
            self.known = read_known(path, self.card, self._files, pages=pages)
        self._model = LoadedModel(path, pages)
        _check_signatures(path, self.card, self._model.inputs)
        self._inputs = {
            name: {item["name"]: item for item in about.get("inputs", ())}
            for name, about in self.card["signatures"].items()
        }
        self._costs = {name: SignatureCost.read(name, self.card) for name in self.signatures}
        self._holds = {
            name: [(key, item["holds"]) for key, item in self.find_inputs(name).items()
                   if "holds" in item]
            for name in self.signatures
        }  # fmt: skip

    @property
    def saved_signatures(self) -> Mapping[str, meta_graph_pb2.SignatureDef]:
        """Its signatures as the SavedModel holds them."""
        return self._model.signatures

    @property
    def index(self) -> int | None:
        """Version of the index; None: there is none."""
        return None if self.known is None else self.known.number

    def read_index(self) -> ServedVersion:
        """Returns the version with its newest index; nothing else of it is loaded again.

        Raises:
            IncompleteVersionError: The index is not whole.
            SluiceError: It is of another model, or damaged.
        """
        version = copy.copy(self)
        users = None if self.known is None else self.known.users
        version.known = read_known(self.path, self.card, self._files, users)
        return version

    @property
    def signatures(self) -> tuple[str, ...]:
        """Names of the signatures."""
        return tuple(self._model.inputs)

    def find_specs(self, signature: str) -> Mapping[str, tf.TensorSpec]:
        """Returns shape and type of the inputs of a signature.

        Raises:
            RequestError: There is no such signature.
        """
        if signature not in self._model.inputs:
            raise RequestError(
                f'Serving signature name: "{signature[:100]}" not found in signature def; '
                f"allowed: {', '.join(self._model.inputs)}"
            )
        return self._model.inputs[signature]

    def find_cost(self, signature: str) -> SignatureCost:
        """Returns what makes calls of a signature expensive."""
        return self._costs[signature]

    def find_inputs(self, signature: str) -> Mapping[str, Mapping[str, Any]]:
        """Returns what `export.json` says of the inputs of a signature, by name."""
        return self._inputs.get(signature, {})

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Calls a signature.

        Raises:
            RequestError: TensorFlow refuses the inputs, a number in an Example is not finite, or an
                output is not: that is the model's fault, not the request's.
        """
        self.find_specs(signature)
        try:
            for name, holds in self._holds.get(signature, ()):
                check_examples(inputs[name], holds)
            outputs = self._model.call(signature, inputs)
        except tf.errors.InvalidArgumentError as error:
            raise RequestError(_explain_shapes(inputs) or _explain(error)) from error
        except UnicodeDecodeError as error:  # Its message quotes bytes that are no text.
            raise RequestError("Could not parse the inputs: they hold a broken Example") from error
        _check_outputs(self, signature, outputs)
        return outputs

    def warm_up(self) -> int:
        """Replays the warm-up requests; returns how many.

        Raises:
            RequestError: One of them fails, or a weight is not finite: a layer may hide that.
        """
        for name, values in self._model.read_weights():
            _check_weight(name, values)
        if WARMUP_FILE not in self.card["files"]:
            return 0
        count = 0
        for record in tf.data.TFRecordDataset(str(self.path / WARMUP_FILE)).as_numpy_iterator():
            signature, inputs = _read_log(PredictionLog.FromString(record))
            self.call(signature, inputs)
            count += 1
        return count

    @cached_property
    def metadata(self) -> bytes:
        """The answer of TensorFlow Serving to a request for metadata, as JSON."""
        signatures = {
            name: _describe_signature(one) for name, one in self._model.signatures.items()
        }
        spec = {"name": self.name, "signature_name": "", "version": str(self.number)}
        metadata = {"signature_def": {"signature_def": signatures}}
        return json.dumps({"model_spec": spec, "metadata": metadata}).encode()


def _name_pages(pages: Path, version: Path, card: Mapping[str, Any]) -> Path:
    """Names the directory of a version's files; another export of its number has another one."""
    return pages / version.parent.name / f"{version.name}-{card['fingerprint'][:16]}"


def _describe_signature(signature: meta_graph_pb2.SignatureDef) -> dict[str, Any]:
    return json_format.MessageToDict(
        signature, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _read_log(log: Any) -> tuple[str, Arrays]:
    kind = log.WhichOneof("log_type")
    request = getattr(log, kind).request
    signature = request.model_spec.signature_name
    if kind == "predict_log":
        return signature, {name: tf.make_ndarray(v) for name, v in request.inputs.items()}
    examples = [e.SerializeToString() for e in request.input.example_list.examples]
    return signature, {"inputs": np.array(examples, object)}


def _check_outputs(version: ServedVersion, signature: str, outputs: Arrays) -> None:
    """Refuses to answer with what is no number.

    Raises:
        RequestError: An output is not finite.
    """
    for name, values in outputs.items():
        if values.dtype.kind != "f" or (is_finite := np.isfinite(values)).all():
            continue
        row = int(np.argwhere(~is_finite)[0][0]) if values.ndim else 0
        raise RequestError(
            f"output {name} of {version.name}, version {version.number}, signature {signature}, is "
            f"not finite in row {row} (from 0), though every input is: its weights are broken, or "
            "an input is far from all that it was trained on",
            FAILED,
        )


def _check_weight(name: str, values: np.ndarray) -> None:
    """Refuses weights that are not finite; TensorFlow's fused layers make zeros of NaN.

    Raises:
        RequestError: They are not.
    """
    if values.dtype.kind != "f":
        return
    values = values.reshape(-1)
    parts = range(0, len(values), CHECKED_AT_ONCE)
    if not all(np.isfinite(values[start : start + CHECKED_AT_ONCE]).all() for start in parts):
        raise RequestError(f"weights {name} are not finite", FAILED)


def _explain_shapes(inputs: Arrays) -> str | None:
    """Says which inputs have other rows than most; None: all have as many."""
    rows = {name: value.shape[0] for name, value in inputs.items() if value.ndim}
    if len(set(rows.values())) < 2:
        return None
    named = ", ".join(f"{name}: {count}" for name, count in list(rows.items())[:20])
    return f"inputs differ in their rows: {named}"


def _explain(error: tf.errors.OpError) -> str:
    """Returns the line of TensorFlow's message that says what was wrong with the inputs.

    Around it stand "Graph execution error:", where the graph was defined and the nodes' names.
    """
    lines = [line[:SEARCHED_CHARACTERS] for line in str(error.message).split("\n", 1000)[:1000]]
    nodes = next((n for n, line in enumerate(lines) if "[[{{node" in line), len(lines))
    said = [line for line in lines[:nodes] if line.strip() and not _AROUND.match(line)]
    return hide_folders((said or lines)[-1].partition(" [Op:")[0].strip())[:300]


def _check_files(version: Path, card: Mapping[str, Any]) -> None:
    """Refuses a version with a file that holds other bytes than were exported.

    Args:
        version: Its directory.
        card: What its `export.json` says.

    Raises:
        InputDataError: There is one, or `export.json` says another thing than was written.
    """
    damaged: str | None = f"{EXPORT_FILE}: what it says is not that of its fingerprint"
    if is_sealed(card):
        damaged = find_damaged(version, card["files"])
    if damaged is not None:
        raise InputDataError(
            f"version {version.name} of {version.parent.name} is not what was exported",
            received=damaged,
            fix="export the run again, or copy the version anew",
        )


def _check_signatures(
    version: Path, card: Mapping[str, Any], held: Mapping[str, Mapping[str, tf.TensorSpec]]
) -> None:
    """Refuses a version whose `export.json` describes another model than the SavedModel is.

    Args:
        version: Its directory.
        card: What its `export.json` says.
        held: Inputs of the signatures of the SavedModel.

    Raises:
        InputDataError: It does.
    """
    said = {name: about["inputs"] for name, about in card["signatures"].items()}
    kinds = [kind for kind, name in _KIND_SIGNATURES.items() if name in held]
    received = ""
    if kinds != [card["kind"]]:
        received = f"kind {card['kind']}, and signatures of {', '.join(kinds) or 'no kind'}"
    elif lone := sorted(said.keys() ^ held.keys()):
        received = f"signature {lone[0]} differs: one of them does not have it"
    elif wrong := [name for name in sorted(said) if _differ(said[name], held[name])]:
        received = f"signature {wrong[0]} differs: names, types or dimensions of its inputs"
    if received:
        raise InputDataError(
            f"{EXPORT_FILE} of version {version.name} of {version.parent.name} and the SavedModel "
            "beside it are not of one export",
            received=received,
            fix="export the run again",
        )


def _differ(said: list[dict[str, Any]], held: Mapping[str, tf.TensorSpec]) -> bool:
    inputs = {item["name"]: item for item in said}
    return inputs.keys() != held.keys() or not all(
        _fits(item, held[name]) for name, item in inputs.items()
    )


def _fits(item: Mapping[str, Any], spec: tf.TensorSpec) -> bool:
    """Whether an input has the type that is said of it, and as many dimensions."""
    dtype = "string" if item["dtype"] == "bytes" else item["dtype"]
    if "is_list" not in item:  # No feature: its dimensions are not said.
        return bool(spec.dtype.name == dtype)
    rank = 1 + item["is_list"] + (item.get("per") == "candidate")
    return bool(spec.dtype.name == dtype and spec.shape.rank == rank)
