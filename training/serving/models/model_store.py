"""Loaded versions of exported models, kept up to date with a directory.

A version is loaded together with its index on a thread of its own, its warm-up requests are
replayed, and only then does the pair take the place of the one before, which goes on answering
until then, and for good if the new one cannot be loaded or fails a request. A new index of the
version that answers makes a new pair with it. Of a directory in an object store the versions that
are tried are brought here first.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from conf.artefacts.export import (
    WARMUP_FILE,
    find_damage,
    read_card,
)
from conf.errors import ConfigError, SluiceError, UpstreamNotReadyError, did_you_mean
from conf.paths import ReadablePath, require_bucket
from training.export.stored_models import FollowedModels
from training.index.known import (
    NO_FILES,
    IncompleteVersionError,
    ItemFiles,
    find_index,
    read_known,
)
from training.index.pages import drop_pages, name_pages
from training.loading.loaded_model import LoadedModel
from training.serving.models.card_checks import check_files, check_signatures
from training.serving.models.metrics import Metrics
from training.serving.requests.errors import (
    FAILED,
    NOT_FOUND,
    UNAVAILABLE,
    RequestError,
    cut,
    hide_folders,
)
from training.serving.requests.limits import SignatureCost
from training.serving.requests.tensors import Arrays, check_examples

METHOD_PREFIX = "tensorflow/serving/"
METHOD_WORDS = {"classify": "classification", "regress": "regression"}
LOADING, AVAILABLE, END = "LOADING", "AVAILABLE", "END"
_AROUND = re.compile(r"Graph execution error|Detected at node|\s*File |<stack traces|\s")
CHECKED_AT_ONCE = 1 << 22
"""Weights that are looked at in one go."""

_log = logging.getLogger("sluice.training.serving")


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

    def __init__(self, path: Path, loading: Loading = Loading()) -> None:
        self.path, self.name, self.number = path, path.parent.name, int(path.name)
        self.card = read_card(path)
        if damage := find_damage(path):
            raise IncompleteVersionError(damage)
        if loading.verify:
            check_files(path, self.card)
        self._files = loading.files or NO_FILES
        pages = None if loading.pages is None else name_pages(loading.pages, path, self.card)
        self.known = None
        if loading.files is not None:
            self.known = read_known(path, self.card, self._files, pages=pages)
        self._model = LoadedModel(path, pages)
        check_signatures(path, self.card, self._model.inputs)
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
        found = copy.copy(self)
        users = None if self.known is None else self.known.users
        found.known = read_known(self.path, self.card, self._files, users)
        return found

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

    def require_method(self, signature: str, method: str) -> None:
        """Checks that a signature is one of `classify` or `regress`.

        Raises:
            RequestError: There is no such signature, or it is of another method.
        """
        about = self.card["signatures"].get(signature)
        if about is None:
            raise RequestError(f"No signature was found with the name: {signature[:100]}")
        if (found := about.get("method", "predict")) != method:
            raise RequestError(
                f"Expected {METHOD_WORDS[method]} signature method_name to be "
                f"{METHOD_PREFIX}{method}. Was: {METHOD_PREFIX}{found}"
            )

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
            found = self._model.call(signature, inputs)
        except tf.errors.InvalidArgumentError as error:
            raise RequestError(_explain_shapes(inputs) or _explain(error)) from error
        except UnicodeDecodeError as error:  # Its message quotes bytes that are no text.
            raise RequestError("Could not parse the inputs: they hold a broken Example") from error
        _check_outputs(self, signature, found)
        return found

    def warm_up(self) -> int:
        """Replays the warm-up requests; returns how many.

        Raises:
            RequestError: One of them fails, or a weight is not finite: a layer may hide that.
        """
        for name, values in self._model.read_weights():
            _check_weight(name, values)
        count = 0
        for record in tf.data.TFRecordDataset(str(self.path / WARMUP_FILE)).as_numpy_iterator():
            signature, inputs = _read_log(PredictionLog.FromString(record))
            self.call(signature, inputs)
            count += 1
        return count

    @cached_property
    def metadata(self) -> bytes:
        """The answer of TensorFlow Serving to a request for metadata, as JSON."""
        found = {name: _describe_signature(one) for name, one in self._model.signatures.items()}
        spec = {"name": self.name, "signature_name": "", "version": str(self.number)}
        metadata = {"signature_def": {"signature_def": found}}
        return json.dumps({"model_spec": spec, "metadata": metadata}).encode()


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
    lines = str(error.message).split("\n")[:1000]
    nodes = next((n for n, line in enumerate(lines) if "[[{{node" in line), len(lines))
    said = [line for line in lines[:nodes] if line.strip() and not _AROUND.match(line)]
    return hide_folders((said or lines)[-1].partition(" [Op:")[0].strip())[:300]


@dataclass
class _Model:
    """A model: what answers, and what is known of each version.

    Attributes:
        current: The version that answers; None: none could be loaded yet.
        states: State and error of each version that was tried.
        refused: What `_read_stamp` gave of each version that failed, so that it is not tried again.
    """

    current: ServedVersion | None = None
    states: dict[int, tuple[str, str]] = field(default_factory=dict)
    refused: dict[Path, tuple[object, ...]] = field(default_factory=dict)


class ModelStore:
    """All models of a directory, each in its newest version that works.

    Args:
        directory: Directory of models, local or in an object store.
        poll_seconds: How often it is looked at.
        metrics: Told of each version and index that is loaded, or fails.
        loading: How versions are loaded.

    Attributes:
        check: Refuses a new version by a SluiceError that says why; None: nothing does.
    """

    def __init__(
        self,
        directory: ReadablePath,
        poll_seconds: float = 2.0,
        metrics: Metrics | None = None,
        loading: Loading = Loading(),
    ) -> None:
        self._source, self._poll_seconds = FollowedModels(directory), poll_seconds
        self._metrics, self._loading = metrics or Metrics(), loading
        self._models: dict[str, _Model] = {}
        self.check: Callable[[ServedVersion], None] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="model-store", daemon=True)

    def require(self, names: Iterable[str]) -> None:
        """Refuses names of models that are not there, before any is loaded.

        Raises:
            ConfigError: There is such a name, or the object store cannot be reached.
        """
        found = self._source.list_versions()
        missing = [name for name in names if found and name not in found]
        if missing:
            raise ConfigError(
                "there is no exported model of that name",
                received=missing[0],
                allowed=", ".join(sorted(found)),
                fix=did_you_mean(missing[0], found),
            )

    def start(self) -> None:
        """Loads the newest version of each model, and goes on looking for newer ones.

        Raises:
            UpstreamNotReadyError: No model can be loaded.
            ConfigError: The object store cannot be reached or refuses, or has no such bucket.
        """
        self.refresh()
        if not self.names:
            require_bucket(self._source.place)
            tried = [f"{name} {number}: {error}" for name, model in self._models.items()
                     for number, (_, error) in model.states.items()]  # fmt: skip
            raise UpstreamNotReadyError(
                "there is no exported model that can be served",
                received=f"{self._source.place}: {'; '.join(tried) or 'no version of any model'}",
                fix="write one by `sluice export --to DIR`",
            )
        self._thread.start()

    def stop(self) -> None:
        """Ends the look-out for new versions."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    @property
    def names(self) -> list[str]:
        """Names of the models that answer."""
        models = list(self._models.items())  # The look-out may add one meanwhile.
        return [name for name, model in models if model.current is not None]

    def get(self, name: str, number: str | None = None, label: str | None = None) -> ServedVersion:
        """Returns the version of a model that answers.

        Args:
            name: Name of the model.
            number: Its version, in digits; None: the newest one that works.
            label: A label of versions, of which there are none.

        Raises:
            RequestError: There is no such model, version or label, or it is not ready.
        """
        _refuse_label(label)
        model = self._models.get(name)
        wanted = f"Latest({name[:100]})" if number is None else f"Specific({name[:100]}, {number})"
        if model is None:
            raise RequestError(f"Servable not found for request: {wanted}", NOT_FOUND)
        if model.current is None:
            raise RequestError(f"Servable is not ready for request: {wanted}", UNAVAILABLE)
        if number is not None and number != str(model.current.number):
            raise RequestError(f"Servable not found for request: {wanted}", NOT_FOUND)
        return model.current

    def describe(
        self, name: str, number: str | None = None, label: str | None = None
    ) -> dict[str, Any]:
        """Returns the states of a model's versions, newest first, as TensorFlow Serving says them.

        Arguments are those of `get`; without a version all are described.

        Raises:
            RequestError: There is no such model, version or label.
        """
        _refuse_label(label)
        states = dict(self._models[name].states) if name in self._models else {}
        chosen = {n: s for n, s in states.items() if number is None or str(n) == number}
        if not chosen:
            wanted = "any versions" if number is None else f"version {number}"
            raise RequestError(f"Could not find {wanted} of model {name[:100]}", NOT_FOUND)
        return {
            "model_version_status": [
                {
                    "version": str(n),
                    "state": state,
                    "status": {"error_code": "INTERNAL" if error else "OK", "error_message": error},
                }
                for n, (state, error) in sorted(chosen.items(), reverse=True)
            ]
        }

    def refresh(self) -> None:
        """Loads what is new; a version that fails leaves the one before in place."""
        for name, numbers in self._source.list_versions().items():
            model = self._models.setdefault(name, _Model())
            for number in reversed(numbers):
                path = self._source.bring(name, number)
                if model.current is not None and model.current.number == number:
                    self._try_index(model, model.current)
                    break
                if self._try_version(model, path):
                    break
            if model.current is not None:
                self._source.drop(name, [n for n in numbers if n >= model.current.number])

    def _try_version(self, model: _Model, path: Path) -> bool:
        number, stamp = int(path.name), _read_stamp(path)
        if model.refused.get(path) == stamp:
            return False
        if model.states.get(number, ("", ""))[0] != LOADING:
            model.states[number] = (LOADING, "")
        start = time.monotonic()
        try:
            version = ServedVersion(path, self._loading)
            if self.check is not None:
                self.check(version)
            requests = version.warm_up()
        except IncompleteVersionError as error:  # Still being copied, it seems: tried again.
            model.states[number] = (LOADING, cut(hide_folders(str(error))))
            return False
        except Exception as error:
            message = error.message if isinstance(error, RequestError) else _describe(error)
            model.states[number] = (END, cut(hide_folders(message)))
            model.refused[path] = stamp
            _log.error("version %d of %s is not served: %s", number, path.parent.name, message)
            self._metrics.count_failure(path.parent.name)
            return False
        before, model.current = model.current, version
        if before is not None and before.index is not None and version.index is None:
            _log.warning(
                "version %d of %s has no index, as version %d had: every item is compared until "
                "there is one: `sluice index --export`",
                number, version.name, before.number,
            )  # fmt: skip
        model.states[number] = (AVAILABLE, "")
        if before is not None:
            model.states[before.number] = (END, "")
        _log.info(
            "version %d of %s answers%s: loaded and called %d times in %.1f s",
            number, version.name, "" if version.index is None else f" by index {version.index}",
            requests, time.monotonic() - start,
        )  # fmt: skip
        self._metrics.count_load(version.name, number, version.index)
        if before is not None and self._loading.pages is not None:
            drop_pages(self._loading.pages, version.name, (before.number, number))
        before = None
        gc.collect()  # Graphs are circles of objects: they hold what the version before had.
        return True

    def _try_index(self, model: _Model, version: ServedVersion) -> None:
        """Takes the newest index of the version that answers, if it has another one by now."""
        if (newest := find_index(version.path)) == version.index:
            return
        if model.refused.get(version.path) == (stamp := _read_stamp(version.path)):
            return
        try:
            model.current = version.read_index()
        except IncompleteVersionError:
            return  # Still being copied, it seems: tried again.
        except Exception as error:
            model.refused[version.path] = stamp
            message = _describe(error)
            _log.error("index %s of %s is not served: %s", newest, version.name, message)
            self._metrics.count_failure(version.name)
            return
        _log.info("index %s of version %d of %s answers", newest, version.number, version.name)
        self._metrics.count_load(version.name, version.number, newest)

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            try:
                self.refresh()
            except SluiceError as error:  # A store that cannot be reached, say.
                _log.error("new versions cannot be looked for: %s", _describe(error))
            except Exception:
                _log.exception("the models could not be looked at; those loaded go on answering")


def _refuse_label(label: str | None) -> None:
    if label:
        raise RequestError(f"Unrecognized servable version label: {label[:100]}")


def _read_stamp(version: Path) -> tuple[object, ...]:
    """Returns what changes when a file of a version is written, replaced, added or removed."""
    found = []
    for path in sorted(version.rglob("*")):
        with suppress(OSError):  # It may vanish meanwhile.
            stat = path.stat()
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _describe(error: Exception) -> str:
    if isinstance(error, SluiceError):
        return " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
