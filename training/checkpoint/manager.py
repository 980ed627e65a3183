"""Checkpoint manager: saves and restores one run's state, writing while training goes on.

Where workers own rows of a matrix, each writes its own, and the chief the rest and the seal; all
agree between two calls of steps that all have written, or that one has failed. Before the seal
there is no checkpoint: a process that is killed at any moment leaves the one before, and files
that the next start removes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.run import BEST_DIR, CHECKPOINTS_DIR, LAST_DIR
from conf.errors import ConfigError, InputDataError, InternalError, TrainingDivergedError
from conf.training.train import CheckpointConfig
from training.checkpoint.checkpoint_files import (
    STATE_PREFIX,
    CheckpointMetadata,
    Position,
    ResumeState,
    link_checkpoint,
    list_checkpoints,
    parse_resume_state,
    prune_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    remove_leftovers,
    seal_checkpoint,
    write_part,
)
from training.checkpoint.saved_tensors import (
    MODEL,
    OPTIMIZERS,
    TrainingState,
    collect_state,
    copy_state,
    copy_variables,
    describe_layout,
    find_non_finite,
    restore_state,
    share_state,
)
from training.distribution.workers import Workers, disk_errors
from training.embedding.worker_rows import RowOwners
from training.models.model import Model

WRITING_DIR = ".writing"
_DISK_ERROR = (
    "cannot write a checkpoint; the one before is untouched",
    "free some space (or check the permissions), then go on with --resume",
)

_log = logging.getLogger("sluice.training.checkpoint")


def build_divergence_error(
    received: str, position: Position, *, has_temperature: bool = False, advice: str = ""
) -> TrainingDivergedError:
    """Returns the error that ends a run whose numbers are no longer finite, after a batch."""
    further = ", or raise model.temperature" if has_temperature else ""
    lower = f"lower optimizer.learning_rate, set optimizer.clip_norm{further}"
    return TrainingDivergedError(
        f"training diverged in epoch {position.epoch + 1}, at step {position.batch + 1}",
        received=received,
        allowed="finite numbers",
        fix=f"{advice or lower}; the checkpoints of earlier steps are untouched",
    )


class CheckpointManager:
    """The checkpoints of one run, which one process alone, or its workers together, write and read.

    The chief writes, and sends the others what it restores.
    """

    def __init__(
        self,
        run: Path,
        model: Model,
        optimizers: tf.Module,
        config: CheckpointConfig | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._config = config or CheckpointConfig()
        self._workers = workers or Workers(tf.distribute.get_strategy())
        self._directory = run / CHECKPOINTS_DIR
        self._last, self._best = self._directory / LAST_DIR, self._directory / BEST_DIR
        self.state = collect_state(**{MODEL: model, OPTIMIZERS: optimizers})
        self.layout = describe_layout(self.state, model)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        # What the chief does once all workers have written their rows.
        self._seal: Callable[[], None] | None = None
        self._unreadable: list[Path] = []
        # The position that was saved or restored last.
        self.saved: Position | None = None

    def restore_last(self, warn: Callable[[str], None] = _log.warning) -> ResumeState | None:
        """Restores the newest readable checkpoint and returns where the run stood, if any."""
        is_shared = bool(self.state.sharded)
        if is_shared:
            self._require_seen()
        restored = self._workers.share(lambda: self._restore_last(warn))
        if restored is None:
            return None
        share_state(self.state, self._workers)
        if is_shared:
            self._restore_rows(Path(restored["path"]))
        resume_state = parse_resume_state(restored["state"])
        self.saved = resume_state.position
        return resume_state

    def _require_seen(self) -> None:
        """Refuses a run that some worker does not see, as each writes its rows there."""
        if self._workers.any(not self._directory.parent.is_dir()):
            raise ConfigError(
                "rows that the workers share are written by each of them: all must see the run",
                received=f"{self._directory.parent}, not seen by one of them",
                fix="set root to a directory on storage that all workers have under one path",
            )

    def _restore_last(self, warn: Callable[[str], None]) -> dict[str, Any] | None:
        remove_leftovers(self._directory)
        self._unreadable = []
        restored = restore_newest(self._last, self.state, warn, self._unreadable)
        return restored and {"path": str(restored[0]), "state": asdict(restored[1])}

    def _restore_rows(self, checkpoint: Path) -> None:
        """Sets the rows of each worker but the chief, which has its own, to a checkpoint's."""
        failure: InputDataError | None = None
        if not self._workers.is_chief:
            try:
                own = TrainingState(dict(self.state.sharded), {})
                restore_state(own, checkpoint / STATE_PREFIX)
            except InputDataError as error:
                failure = error
        if self._workers.any(failure is not None):
            told = "another worker cannot read its rows of a checkpoint"
            raise failure or InputDataError(told, received=checkpoint, fix="see what it says")

    def save(self, resume_state: ResumeState, *, best: bool = False) -> None:
        """Copies the state and writes it, after the write before has ended, which may raise.

        Where a number is not finite nothing is written.
        """
        self.wait()  # Two copies of the state are never held at once.
        self.saved = resume_state.position
        is_chief, sharded = self._workers.is_chief, self.state.sharded
        if not is_chief and not sharded:
            return
        own = copy_variables(sharded)
        copied = copy_state(self.state) if is_chief else {}
        common = {name: tensor for name, tensor in copied.items() if name not in own}
        metadata = CheckpointMetadata(resume_state, self.layout)

        def write() -> None:
            self._write_part(own, common, resume_state.position)
            if not sharded:
                self._publish(metadata, best)

        self._seal = (lambda: self._publish(metadata, best)) if sharded else None
        self._write = self._executor.submit(write)
        if not self._config.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raises what a write in the background raised, if it has ended.

        Where each worker writes rows, all call it together.
        """
        is_done = self._write is None or self._write.done()
        if is_done if self._seal is None else not self._workers.any(not is_done):
            self.wait()

    def wait(self) -> None:
        """Waits until all that was saved is on the disk, and raises what the write raised.

        Where each worker writes rows, all call it together.
        """
        seal, self._seal = self._seal, None
        if seal is None:
            self._wait_here()
        else:
            self._wait_for_all()
            self._workers.share(seal)

    def close(self) -> None:
        """Lets the write under way end; raises nothing."""
        self._executor.shutdown(wait=True)

    def _wait_here(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def _wait_for_all(self) -> None:
        """Waits until all workers have written; all fail where one has failed."""
        failure: Exception | None = None
        try:
            self._wait_here()
        except (TrainingDivergedError, InternalError) as error:
            failure = error
        has_diverged = self._workers.any(isinstance(failure, TrainingDivergedError))
        if not self._workers.any(failure is not None):
            return
        if has_diverged:
            at = self.saved or Position(0, 0)
            raise failure or build_divergence_error("a row of another worker is not finite", at)
        told, fix = _DISK_ERROR
        raise failure or InternalError(told, received="another worker could not write", fix=fix)

    def _write_part(
        self, own: Mapping[str, tf.Tensor], common: Mapping[str, tf.Tensor], position: Position
    ) -> None:
        name = find_non_finite([*own.items(), *common.items()])
        if name is not None:
            raise build_divergence_error(f"{name} is not finite", position)
        owners = RowOwners(self._workers.index, self._workers.count) if own else RowOwners(0, 1)
        with self._writing() as writing:
            if not own:  # No other worker writes there.
                remove_leftovers(self._directory)
            write_part(writing, owners, own, common)

    def _publish(self, metadata: CheckpointMetadata, best: bool) -> None:
        """Makes a checkpoint of what has been written, and moves it among the others."""
        position = metadata.resume_state.position
        with self._writing() as writing:
            seal_checkpoint(writing, self._workers.count if self.state.sharded else 1, metadata)
            if best:
                linked = writing.with_suffix(".best")
                link_checkpoint(writing, linked)
                publish_checkpoint(linked, self._best, position)
                prune_checkpoints(self._best, self._config.keep_best)
            # The last one comes last: it is what says that an epoch is done.
            publish_checkpoint(writing, self._last, position)
            prune_checkpoints(self._last, self._config.keep_last, self._unreadable)
        self._unreadable = []

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """Yields where a checkpoint is written; removed where that fails."""
        writing = self._directory / WRITING_DIR
        with disk_errors(*_DISK_ERROR):
            try:
                yield writing
            except BaseException:
                if not self.state.sharded:  # Where others do not write, a full disk gets its room.
                    shutil.rmtree(writing, ignore_errors=True)
                raise


def restore_newest(
    directory: Path,
    state: TrainingState,
    warn: Callable[[str], None] = _log.warning,
    refused: list[Path] | None = None,
) -> tuple[Path, ResumeState] | None:
    """Sets the state to the newest checkpoint of a directory that can be read, and returns it.

    `warn` is told of each that is passed over, and `refused` gets it; where there are some and none
    fits the model and can be read, the newest one's error is raised.
    """
    first: InputDataError | None = None
    for entry in reversed(list_checkpoints(directory)):
        try:
            metadata = read_checkpoint(entry.path)
            restore_state(state, entry.path / STATE_PREFIX)
            return entry.path, metadata.resume_state
        except InputDataError as error:
            if refused is not None:
                refused.append(entry.path)
            first = first or error
            warn(f"passing over checkpoint {entry.path}: {error.received}")
    if first is not None:
        raise first
    return None
