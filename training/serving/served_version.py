"""A version of a model that is served: checked to be what was exported, loaded, called."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from conf.artefacts.export import (
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
from training.serving.errors import FAILED, RequestError, hide_folders
from training.serving.limits import SignatureCost
from training.serving.tensors import Arrays, Signature, encode_json

_AROUND = re.compile(r"Graph execution error|Detected at node|\s*File |<stack traces|\s")
SEARCHED_BYTES = 1 << 17
"""What is searched of a message of TensorFlow, which may quote an input."""


@dataclass(frozen=True)
class Loading:
    """How versions are loaded."""

    files: ItemFiles = NO_FILES
    verify: bool = True  # Whether the SHA-256 of each file is compared first.
    pages: Path | None = None  # Directory of what processes share.


USUAL_LOADING = Loading()


class ServedVersion:
    """A loaded version of a model, and what is `known` of its users and items; None: nothing."""

    def __init__(self, path: Path, loading: Loading = USUAL_LOADING) -> None:
        self.path, self.name, self.number = path, path.parent.name, int(path.name)
        self.card, self._files = read_card(path), loading.files
        if damage := find_damage(path):
            raise IncompleteVersionError(damage)
        if loading.verify:
            _check_files(path, self.card)
        pages = None
        if loading.pages is not None:  # Another export of its number has another folder.
            pages = loading.pages / self.name / f"{path.name}-{self.card['fingerprint'][:16]}"
        self.known = read_known(path, self.card, self._files, pages=pages)
        self._model = LoadedModel(path, pages)
        self.signatures = {
            name: Signature(
                specs,
                {item["name"]: item for item in self.card["signatures"][name]["inputs"]},
                SignatureCost.read(name, self.card),
            )
            for name, specs in self._model.inputs.items()
        }

    @property
    def index(self) -> int | None:
        """Version of the index; None: there is none."""
        return None if self.known is None else self.known.number

    def read_index(self) -> ServedVersion:
        """Returns the version with its newest index; nothing else of it is loaded again."""
        version = copy.copy(self)
        users = None if self.known is None else self.known.users
        version.known = read_known(self.path, self.card, self._files, users)
        return version

    def find_signature(self, name: str) -> Signature:
        """Returns a signature; there may be none of the name that a request gives."""
        if name not in self.signatures:
            raise RequestError(
                f'Serving signature name: "{name[:100]}" not found in signature def; '
                f"allowed: {', '.join(self.signatures)}"
            )
        return self.signatures[name]

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Calls a signature; an output that is not finite is the model's fault."""
        try:
            outputs = self._model.call(signature, inputs)
        except tf.errors.InvalidArgumentError as error:
            raise RequestError(_explain(error)) from error
        except UnicodeDecodeError as error:  # Its message quotes bytes that are no text.
            raise RequestError("Could not parse the inputs: they hold a broken Example") from error
        for name, values in outputs.items():
            if values.dtype.kind == "f" and not (is_finite := np.isfinite(values)).all():
                row = int(np.argwhere(~is_finite)[0][0]) if values.ndim else 0
                raise RequestError(
                    f"output {name} of {self.name}, version {self.number}, signature {signature}, "
                    f"is not finite in row {row} (from 0), though every input is",
                    FAILED,
                )
        return outputs

    def warm_up(self) -> int:
        """Replays the warm-up requests; returns how many."""
        for name, values in self._model.read_weights():
            # TensorFlow's fused layers make zeros of NaN; of NaN both bounds are NaN.
            bounds = [values.min(), values.max()] if values.dtype.kind == "f" and values.size else 0
            if not np.isfinite(bounds).all():
                raise RequestError(f"weights {name} are not finite", FAILED)
        if WARMUP_FILE not in self.card["files"]:
            return 0
        count = 0
        for record in tf.data.TFRecordDataset(str(self.path / WARMUP_FILE)).as_numpy_iterator():
            self.call(*_read_log(PredictionLog.FromString(record)))
            count += 1
        return count

    @cached_property
    def metadata(self) -> bytes:
        """The answer of TensorFlow Serving to a request for metadata, as JSON."""
        signatures = {
            name: json_format.MessageToDict(
                one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for name, one in self._model.signatures.items()
        }
        spec = {"name": self.name, "signature_name": "", "version": str(self.number)}
        metadata = {"signature_def": {"signature_def": signatures}}
        return encode_json({"model_spec": spec, "metadata": metadata})


def _read_log(log: Any) -> tuple[str, Arrays]:
    kind = log.WhichOneof("log_type")
    request = getattr(log, kind).request
    signature = request.model_spec.signature_name
    if kind == "predict_log":
        return signature, {name: tf.make_ndarray(v) for name, v in request.inputs.items()}
    examples = [e.SerializeToString() for e in request.input.example_list.examples]
    return signature, {"inputs": np.array(examples, object)}


def _explain(error: tf.errors.OpError) -> str:
    """Returns what was wrong with the inputs: a line amid where the graph was defined."""
    lines = str(error.message)[:SEARCHED_BYTES].partition("[[{{node")[0].splitlines()
    said = [line for line in lines if line.strip() and not _AROUND.match(line)]
    return hide_folders((said or [""])[-1].partition(" [Op:")[0].strip())[:300]


def _check_files(version: Path, card: Mapping[str, Any]) -> None:
    """Refuses a version with a file that holds other bytes than were exported."""
    damaged: str | None = f"{EXPORT_FILE}: what it says is not that of its fingerprint"
    if is_sealed(card):
        damaged = find_damaged(version, card["files"])
    if damaged is not None:
        raise InputDataError(
            f"version {version.name} of {version.parent.name} is not what was exported",
            received=damaged,
            fix="export the run again, or copy the version anew",
        )
