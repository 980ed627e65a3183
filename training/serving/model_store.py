"""Loaded versions of exported models, kept up to date with a directory.

A version is loaded together with its index on a thread of its own, its warm-up requests are
replayed, and only then does the pair take the place of the one before, which goes on answering
for good if the new one fails. A new index of the version that answers makes a new pair with it.
"""

from __future__ import annotations

import gc
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import SluiceError, UpstreamNotReadyError
from conf.paths import ReadablePath, require_bucket
from training.export.stored_models import FollowedModels
from training.index.known_entities import IncompleteVersionError, find_index
from training.serving.errors import NOT_FOUND, UNAVAILABLE, RequestError, hide_folders
from training.serving.served_version import USUAL_LOADING, Loading, ServedVersion

OnLoad = Callable[[str, ServedVersion | None], None]
"""Is given the name of a model and what answers now; None: what was to be loaded failed."""
_log = logging.getLogger("sluice.training.serving")


@dataclass
class _Model:
    """A model: what answers, state and error of each version, and stamps of those that failed."""

    current: ServedVersion | None = None
    states: dict[int, tuple[str, str]] = field(default_factory=dict)
    refused: dict[Path, tuple[object, ...]] = field(default_factory=dict)


class ModelStore:
    """The models of a directory, each in its newest version that works."""

    def __init__(
        self,
        directory: ReadablePath,
        poll_seconds: float = 2.0,
        loading: Loading = USUAL_LOADING,
        on_load: OnLoad = lambda *_: None,
    ) -> None:
        self._source, self._poll_seconds = FollowedModels(directory), poll_seconds
        self._loading, self._on_load = loading, on_load
        self._models: dict[str, _Model] = {}
        self._check: Callable[[ServedVersion], None] = lambda _: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="model-store", daemon=True)

    def load(self) -> None:
        """Loads the newest version of each model; that there is none is an error."""
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

    def start(self, check: Callable[[ServedVersion], None] | None = None) -> None:
        """Looks out for new versions, which `check` may refuse."""
        self._check = check or self._check
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    @property
    def names(self) -> list[str]:
        """Names of the models that answer."""
        models = list(self._models.items())  # The look-out may add one meanwhile.
        return [name for name, model in models if model.current is not None]

    def get(self, name: str, number: str | None = None) -> ServedVersion:
        """Returns the version of a model that answers."""
        model = self._models.get(name)
        found = None if model is None else model.current
        wanted = f"Latest({name[:100]})" if number is None else f"Specific({name[:100]}, {number})"
        if model is not None and found is None:
            raise RequestError(f"Servable is not ready for request: {wanted}", UNAVAILABLE)
        if found is None or number not in (None, str(found.number)):
            raise RequestError(f"Servable not found for request: {wanted}", NOT_FOUND)
        return found

    def describe(self, name: str, number: str | None = None) -> dict[str, Any]:
        """Returns the states of all versions or one, newest first, as TensorFlow Serving does."""
        states = dict(self._models[name].states) if name in self._models else {}
        chosen = {n: s for n, s in states.items() if number is None or str(n) == number}
        if not chosen:
            wanted = "any versions" if number is None else f"version {number}"
            raise RequestError(f"Could not find {wanted} of model {name[:100]}", NOT_FOUND)
        described = [
            {
                "version": str(n),
                "state": state,
                "status": {"error_code": "INTERNAL" if error else "OK", "error_message": error},
            }
            for n, (state, error) in sorted(chosen.items(), reverse=True)
        ]
        return {"model_version_status": described}

    def refresh(self) -> None:
        """Loads what is new; a version or an index that fails leaves the one before in place."""
        for name, numbers in self._source.list_versions().items():
            model = self._models.setdefault(name, _Model())
            for number in reversed(numbers):
                path = self._source.bring(name, number)
                if model.current is not None and model.current.number == number:
                    if find_index(path) != model.current.index:
                        self._try(
                            model, path, f"index {find_index(path)}", model.current.read_index
                        )
                    break
                model.states.setdefault(number, ("LOADING", ""))
                if self._try(model, path, f"version {number}", partial(self._load, path)):
                    gc.collect()  # Graphs are circles of objects: they hold the version before.
                    break
            if model.current is not None:
                self._source.drop(name, [n for n in numbers if n >= model.current.number])

    def _load(self, path: Path) -> ServedVersion:
        version = ServedVersion(path, self._loading)
        self._check(version)
        version.warm_up()
        return version

    def _try(self, model: _Model, path: Path, what: str, load: Callable[[], ServedVersion]) -> bool:
        """Loads a version, or its newest index; returns whether it answers."""
        name, number, before = path.parent.name, int(path.name), model.current
        stamp, start = _read_stamp(path), time.monotonic()
        if model.refused.get(path) == stamp:
            return False
        try:
            version = load()
        except Exception as error:
            said, is_new = _describe(error), before is None or before.number != number
            if is_new:
                is_copied = isinstance(error, IncompleteVersionError)
                model.states[number] = ("LOADING" if is_copied else "END", hide_folders(said))
            if not isinstance(error, IncompleteVersionError):  # Else it is tried again.
                model.refused[path] = stamp
                _log.error("%s of %s is not served: %s", what, name, said)
                self._on_load(name, None)
            return False
        model.current, seconds = version, time.monotonic() - start
        _log.info("%s of %s answers: loaded in %.1f s", what, name, seconds)
        self._on_load(name, version)
        if before is not None and before.number != number:
            self._leave(model, before, version)
        model.states[number] = ("AVAILABLE", "")
        return True

    def _leave(self, model: _Model, before: ServedVersion, version: ServedVersion) -> None:
        model.states[before.number] = ("END", "")
        if before.index is not None and version.index is None:
            _log.warning(
                "version %d of %s has no index, as version %d had: every item is compared until "
                "there is one: `sluice index --export`",
                version.number, version.name, before.number,
            )  # fmt: skip
        if self._loading.pages is not None:  # Who has mapped files goes on reading them.
            for folder in (self._loading.pages / version.name).glob("*-*"):
                if int(folder.name.partition("-")[0]) not in (before.number, version.number):
                    shutil.rmtree(folder, ignore_errors=True)

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            try:
                self.refresh()
            except Exception as error:  # A store that cannot be reached, say.
                _log.error("new versions cannot be looked for: %s", _describe(error))


def _read_stamp(version: Path) -> tuple[object, ...]:
    """Returns what changes when a file of a version is written, replaced, added or removed."""
    stamps = []
    for path in sorted(version.rglob("*")):
        with suppress(OSError):  # It may vanish meanwhile.
            stat = path.stat()
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(stamps)


def _describe(error: Exception) -> str:
    if isinstance(error, SluiceError | RequestError):
        return " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
