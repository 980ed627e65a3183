"""Checkpoint manager: saves and restores one run's state, writing while training goes on."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.run import BEST_DIR, CHECKPOINTS_DIR, LAST_DIR
from conf.errors import InputDataError
from conf.training.train import CheckpointConfig
from training.checkpoint.checkpoint_files import (
    CheckpointLayout,
    CheckpointMetadata,
    link_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    remove_leftovers,
    seal_checkpoint,
    write_checkpoint,
)
from training.checkpoint.checkpoint_parts import DISK_ERROR, CheckpointParts
from training.checkpoint.checkpoint_tensors import STATE_PREFIX
from training.checkpoint.resume_state import (
    Position,
    ResumeState,
    build_divergence_error,
    parse_resume_state,
)
from training.checkpoint.saved_tensors import (
    MODEL,
    OPTIMIZERS,
    TrainingState,
    collect_state,
    copy_state,
    copy_variables,
    find_non_finite,
    restore_state,
    share_state,
)
from training.distribution.workers import Workers, disk_errors
from training.models.model import Model


class BackgroundWriter:
    """Runs writes one after the other; what one raises is raised by the next call.

    Args:
        asynchronous: Whether writes run in a thread while the caller goes on.
    """

    def __init__(self, asynchronous: bool) -> None:
        self._executor = (
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        )
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Starts a write, after the one before has ended.

        Raises:
            Exception: What the one before raised, or this one where it runs in the caller.
        """
        self.wait()
        if self._executor is None:
            write()
        else:
            self._pending = self._executor.submit(write)

    @property
    def is_done(self) -> bool:
        """Whether no write is under way."""
        return self._pending is None or self._pending.done()

    def check(self) -> None:
        """Raises what a write that has ended raised; does not wait."""
        if self.is_done:
            self.wait()

    def wait(self) -> None:
        """Waits for the write under way, and raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the write under way and ends the thread; raises nothing."""
        self._pending = None
        if self._executor is not None:
            self._executor.shutdown(wait=True)


WRITING_DIR = ".writing"

_log = logging.getLogger("sluice.training.checkpoint")


class CheckpointManager:
    """The checkpoints of one run, which one process alone writes and reads.

    Args:
        run: Directory of the run.
        model: The model.
        optimizers: Its optimizers, with the moments that a resumed run goes on from.
        config: How many to keep, and whether to write while training goes on.
        workers: The processes of the run; the chief writes, and sends the others what it restores.
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
        self._writer = BackgroundWriter(self._config.asynchronous)
        self._parts = CheckpointParts(self._directory / WRITING_DIR, self._workers)
        # What the chief does once all processes have written their rows; None: nothing is written.
        self._pending: Callable[[], None] | None = None
        self._unreadable: list[Path] = []
        self._saved: Position | None = None

    @property
    def newest_epoch(self) -> int:
        """Finished epochs of the newest checkpoint to resume from, readable or not; 0: none."""
        entries = list_checkpoints(self._last)
        return entries[-1].position.epoch if entries else 0

    @property
    def saved(self) -> Position | None:
        """The position that was saved or restored last."""
        return self._saved

    def restore_last(self, warn: Callable[[str], None] = _log.warning) -> ResumeState | None:
        """Restores the newest readable checkpoint and returns where the run stood, if any.

        Args:
            warn: Receives a message for each damaged checkpoint that is passed over.

        Raises:
            InputDataError: No checkpoint fits the model and can be read.
        """
        if self.state.sharded:
            self._parts.require_shared(self._directory.parent)
        restored = self._workers.share(lambda: self._restore_last(warn))
        if restored is None:
            return None
        share_state(self.state, self._workers)
        if self.state.sharded:
            self._parts.restore(self.state, Path(restored["path"]))
        resume_state = parse_resume_state(restored["state"])
        self._saved = resume_state.position
        return resume_state

    def _restore_last(self, warn: Callable[[str], None]) -> dict[str, Any] | None:
        remove_leftovers(self._directory)
        restored, self._unreadable = restore_newest(self._last, self.state, warn)
        if restored is None:
            return None
        state = restored.metadata.resume_state
        return {"state": asdict(state), "path": str(restored.path)}

    def save(self, resume_state: ResumeState, *, best: bool = False) -> None:
        """Copies the state and writes it, after the write before has ended.

        Args:
            resume_state: Where the run is.
            best: Whether it is the best epoch so far.

        Raises:
            InternalError: This write or the one before failed.
            TrainingDivergedError: A saved number is not finite; nothing was written.
        """
        metadata = CheckpointMetadata(resume_state, self.layout)
        if self.state.sharded:
            self._save_parts(metadata, best)
            return
        if not self._workers.is_chief:
            self._saved = resume_state.position
            return
        self._writer.wait()  # Two copies of the state are never held at once.
        tensors = copy_state(self.state)
        self._saved = resume_state.position
        self._writer.submit(lambda: self._write(tensors, metadata, best))

    def _save_parts(self, metadata: CheckpointMetadata, best: bool) -> None:
        """Has each process write its rows, and the chief the rest; `_seal_parts` ends it."""
        self.wait()
        tensors = copy_state(self.state) if self._workers.is_chief else {}
        own = copy_variables(self.state.sharded)
        common = {name: tensor for name, tensor in tensors.items() if name not in own}
        self._saved = metadata.resume_state.position
        self._pending = lambda: self._seal(metadata, best)
        self._writer.submit(lambda: self._parts.write(own, common, metadata.resume_state.position))
        if not self._config.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raises what a write in the background raised, if it has ended.

        Where each process writes rows, all call it together.
        """
        if self._pending is None:
            self._writer.check()
        elif self._workers.all(self._writer.is_done):
            self.wait()

    def wait(self) -> None:
        """Waits until all that was saved is on the disk, and raises what the write raised.

        Where each process writes rows, all call it together.
        """
        if self._pending is None:
            self._writer.wait()
            return
        seal, self._pending = self._pending, None
        self._parts.wait(self._writer.wait, self._saved)
        self._workers.share(seal)

    def close(self) -> None:
        """Lets the write under way end; raises nothing."""
        self._writer.close()

    def _write(
        self, tensors: Mapping[str, tf.Tensor], metadata: CheckpointMetadata, best: bool
    ) -> None:
        position = metadata.resume_state.position
        name = find_non_finite(tensors.items())
        if name is not None:
            raise build_divergence_error(f"{name} is not finite", position)
        with self._writing() as writing:
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._directory)
            write_checkpoint(writing, tensors, metadata)
            self._publish(writing, position, best)

    def _seal(self, metadata: CheckpointMetadata, best: bool) -> None:
        """Makes a checkpoint of what all processes have written."""
        with self._writing() as writing:
            seal_checkpoint(writing, self._parts.collect(), metadata)
            self._publish(writing, metadata.resume_state.position, best)
            remove_leftovers(self._directory)

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """Yields where a checkpoint is written; removed where that fails."""
        writing = self._directory / WRITING_DIR
        with disk_errors(*DISK_ERROR):
            try:
                yield writing
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)  # A full disk needs the room.
                raise
        self._unreadable = []

    def _publish(self, writing: Path, position: Position, best: bool) -> None:
        if best:
            linked = writing.with_suffix(".best")
            link_checkpoint(writing, linked)
            publish_checkpoint(linked, self._best, position)
            prune_checkpoints(self._best, self._config.keep_best)
        # The last one comes last: it is what says that an epoch is done.
        publish_checkpoint(writing, self._last, position)
        prune_checkpoints(self._last, self._config.keep_last, self._unreadable)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint that a state was set to.

    Attributes:
        path: Its directory.
        metadata: What it says of itself.
    """

    path: Path
    metadata: CheckpointMetadata


def restore_newest(
    directory: Path, state: TrainingState, warn: Callable[[str], None] = _log.warning
) -> tuple[RestoredCheckpoint | None, list[Path]]:
    """Sets the state to the newest checkpoint that can be read.

    Args:
        directory: The checkpoints.
        state: The variables to set.
        warn: Receives a message for each damaged checkpoint that is passed over.

    Returns:
        The checkpoint, or None where there is none; and the checkpoints that were passed over.

    Raises:
        InputDataError: There are checkpoints, and none fits the model and can be read.
    """
    refused: list[Path] = []
    first: InputDataError | None = None
    for entry in reversed(list_checkpoints(directory)):
        try:
            metadata = read_checkpoint(entry.path)
            restore_state(state, entry.path / STATE_PREFIX)
        except InputDataError as error:
            refused.append(entry.path)
            first = first or error
            warn(f"passing over checkpoint {entry.path}: {error.received}")
        else:
            return RestoredCheckpoint(entry.path, metadata), refused
    if first is not None:
        raise first
    return None, []


def describe_layout(state: TrainingState, model: Model) -> CheckpointLayout:
    """Returns which tensor holds which of a model's weights."""
    tables = {name: model.tables[name].rows for name in sorted(model.tables)}
    keys = {name: state.name_of_keys(rows) for name, rows in tables.items()}
    return CheckpointLayout(
        {name: state.name_of(rows) for name, rows in tables.items()},
        tuple(state.name_of(variable) for variable in model.dense_variables),
        {name: found for name, found in keys.items() if found is not None},
        tuple(name for name in tables if name not in model.trained_tables),
    )
