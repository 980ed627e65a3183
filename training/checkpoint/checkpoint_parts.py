"""Checkpoints that several processes write: each its own rows, the chief the rest and the seal.

    each process   writes the rows that it owns beside the others', in the background
    all            agree between two calls of steps that all have written, or that one has failed
    chief          seals the files and moves them into place

Before the seal there is no checkpoint. So a process that is killed at any moment leaves the one
before, and files that the next start removes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.errors import ConfigError, InputDataError, InternalError, TrainingDivergedError
from conf.storage.atomic_output import write_text_atomic
from training.checkpoint.checkpoint_files import write_files
from training.checkpoint.checkpoint_tensors import STATE_PREFIX, name_part
from training.checkpoint.resume_state import Position, build_divergence_error
from training.checkpoint.saved_tensors import TrainingState, find_non_finite, restore_rows
from training.distribution.workers import Workers, disk_errors
from training.embedding.worker_rows import RowOwners

DISK_ERROR = (
    "cannot write a checkpoint; the one before is untouched",
    "free some space (or check the permissions), then go on with --resume",
)
_WRITTEN_SUFFIX = ".written"


class CheckpointParts:
    """The files of a checkpoint that the processes of a run write together.

    Args:
        writing: Directory that it is written in; all processes see it.
        workers: The processes.
    """

    def __init__(self, writing: Path, workers: Workers) -> None:
        self._writing, self._workers = writing, workers
        self._owners = RowOwners(workers.index, workers.count)

    def require_shared(self, run: Path) -> None:
        """Refuses a run that some process does not see.

        Raises:
            ConfigError: Its directory is not on storage that all processes share.
        """
        if self._workers.any(not run.is_dir()):
            raise ConfigError(
                "rows that the workers share are written by each of them: all must see the run",
                received=f"{run}: not seen by "
                + ("another worker" if run.is_dir() else f"worker {self._workers.index}"),
                fix="set root to a directory on storage that all workers have under one path",
            )

    def write(
        self, own: Mapping[str, tf.Tensor], common: Mapping[str, tf.Tensor], position: Position
    ) -> None:
        """Writes what this process has of a checkpoint.

        Args:
            own: Rows that it owns, by matrix.
            common: What all have alike, on the chief; else nothing.
            position: Where training is.

        Raises:
            TrainingDivergedError: A number is not finite; nothing was written.
            InternalError: The disk is full, or there is no permission.
        """
        name = find_non_finite([*own.items(), *common.items()])
        if name is not None:
            raise build_divergence_error(f"{name} is not finite", position)
        with disk_errors(*DISK_ERROR):
            self._writing.mkdir(parents=True, exist_ok=True)
            part = name_part(self._owners)
            files = write_files(self._writing, part, own)
            if common:
                files |= write_files(self._writing, STATE_PREFIX, common)
            write_text_atomic(self._writing / f"{part}{_WRITTEN_SUFFIX}", json.dumps(files))

    def wait(self, write: Callable[[], None], position: Position | None) -> None:
        """Waits until all processes have written; all fail where one has failed.

        Args:
            write: Waits for this process' own write, and raises what it raised.
            position: Where training was when it was saved.

        Raises:
            TrainingDivergedError: A number is not finite, at this process or another one.
            InternalError: A process could not write.
        """
        failure: Exception | None = None
        try:
            write()
        except (TrainingDivergedError, InternalError) as error:
            failure = error
        has_diverged = self._workers.any(isinstance(failure, TrainingDivergedError))
        has_failed = self._workers.any(failure is not None)
        if failure is not None:
            raise failure
        if has_diverged and position is not None:
            raise build_divergence_error("a row of another worker is not finite", position)
        if has_failed:
            raise InternalError(
                DISK_ERROR[0],
                received=f"worker {self._workers.index}: another worker could not write its rows",
                fix=f"see what that worker says; {DISK_ERROR[1]}",
            )

    def collect(self) -> dict[str, dict[str, Any]]:
        """Returns size and SHA-256 of the files that all processes have written, on the chief.

        Raises:
            ConfigError: Some are not there.
        """
        files: dict[str, dict[str, Any]] = {}
        for index in range(self._workers.count):
            part = name_part(RowOwners(index, self._workers.count))
            written = self._writing / f"{part}{_WRITTEN_SUFFIX}"
            if not written.is_file():
                raise ConfigError(
                    "a worker has written its rows where the chief does not see them",
                    received=f"no {written}",
                    fix="set root to a directory on storage that all workers have under one path",
                )
            files |= json.loads(written.read_text(encoding="utf-8"))
            written.unlink()
        return files

    def restore(self, state: TrainingState, checkpoint: Path) -> None:
        """Sets the rows of each process but the chief, which has its own, to a checkpoint's.

        Raises:
            InputDataError: A process cannot read them.
        """
        failure: InputDataError | None = None
        if not self._workers.is_chief:
            try:
                restore_rows(state, checkpoint / STATE_PREFIX)
            except InputDataError as error:
                failure = error
        if self._workers.any(failure is not None):
            raise failure or InputDataError(
                "another worker cannot read its rows of a checkpoint",
                received=checkpoint,
                fix="see what that worker says; all must see the run under one path",
            )
