"""Runs in object stores: found and downloaded, held while they are trained, and uploaded.

A run is worked on in its copy (see `conf.publication.working_copy`). Each checkpoint is brought
to the store once it is whole, so that another machine can go on where this one was lost.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.artefacts.entries import resolve_entry
from conf.artefacts.run import (
    CHECKPOINT_FILE,
    CHECKPOINTS_DIR,
    HISTORY_FILE,
    LAST_DIR,
    RUN,
    RUN_CARD_FILE,
    RUNS_DIR,
    resolve_run,
)
from conf.deadline import repeating
from conf.errors import SluiceError
from conf.publication.entries import set_pointer
from conf.publication.holds import hold_lease, read_holder
from conf.publication.working_copy import WorkingCopy, find_working_copy
from conf.storage.atomic_output import write_text_atomic
from conf.storage.locations import StoredPath, find_path, is_remote
from conf.storage.object_store import reaching
from conf.training.train import TrainConfig

_POLL_S = 1.0

_log = logging.getLogger("sluice.training.stored_runs")


def find_run(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of a run, or of a series' last finished one; downloads stored ones."""
    if not is_remote(os.fspath(path)):
        return resolve_run(os.fspath(path))
    copy = WorkingCopy.at(str(resolve_entry(find_path(path), RUN)))
    copy.pull()
    return copy.local


def bring_back(run: Path) -> None:
    """Brings what a job has changed of a run to the store, where the run lies in one."""
    if (copy := find_working_copy(run)) is not None:
        copy.push()


class StoredSeries:
    """The runs of a config in a store: what is between them and their copies here."""

    def __init__(self, config: TrainConfig) -> None:
        self._copy = WorkingCopy.at(f"{config.root.rstrip('/')}/{config.name}")

    def bring_newest(self, config_sha256: str) -> None:
        """Brings the newest run of a config here, with its checkpoints."""
        with reaching(self._copy.remote):
            runs = self._copy.remote.child(RUNS_DIR).list_folders()
        for run_id in sorted(runs, reverse=True):
            copy = self._copy.child(RUNS_DIR).child(run_id)
            copy.pull(lambda key: key == RUN_CARD_FILE)
            card = copy.local / RUN_CARD_FILE
            if card.is_file() and f'"{config_sha256}"' in card.read_text(encoding="utf-8"):
                # What this copy had last is at least as new here.
                if read_holder(copy.remote) != copy.read_id():
                    copy.pull()
                    _remove_unfinished(copy.local)
                    _cut_history(copy.local)
                return

    @contextmanager
    def kept(self, run: Path) -> Iterator[None]:
        """Holds a run for this process, and brings its checkpoints to the store while it trains."""
        copy = self._copy.child(RUNS_DIR).child(run.name)
        copy.begin()
        with hold_lease(copy.remote, copy.read_id()) as lease:
            seen: list[Path] = []

            def bring() -> None:
                lease.check()
                copy.push()

            def bring_new() -> None:
                if (now := _list_checkpoints(run)) != seen:
                    seen[:] = now
                    _try("a checkpoint is not in the store yet", bring)

            try:
                with repeating(_POLL_S, bring_new):
                    yield
            except BaseException:  # What went wrong first is raised.
                _try("the run's last state is not in the store", bring)
                raise
            bring()

    def publish(self, run: Path) -> None:
        """Brings a finished run to the store, and makes it the current one of its series there."""
        self._copy.child(RUNS_DIR).child(run.name).push()
        set_pointer(StoredPath(self._copy.remote), run.name)


def _try(otherwise: str, bring: Callable[[], None]) -> None:
    try:
        bring()
    except (SluiceError, OSError) as error:
        _log.warning("%s: %s", otherwise, error)


def _remove_unfinished(run: Path) -> None:
    """Removes checkpoints that were brought in part: their marker comes last."""
    for folder in _list_checkpoints(run):
        if not (folder / CHECKPOINT_FILE).is_file():
            _log.warning("%s did not get to the store whole: it is left out", folder.name)
            shutil.rmtree(folder)


def _cut_history(run: Path) -> None:
    """Leaves out epochs that no whole checkpoint has behind it: training went on meanwhile."""
    newest = [path.name for path in _list_checkpoints(run) if path.parent.name == LAST_DIR]
    epochs = int(max(newest).partition("-")[0]) if newest else 0
    file = run / HISTORY_FILE
    history = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    if len(history) > epochs:
        write_text_atomic(file, json.dumps(history[:epochs], indent=1) + "\n")


def _list_checkpoints(run: Path) -> list[Path]:
    return sorted((run / CHECKPOINTS_DIR).glob("*/[0-9]*"))
