"""Saves and restores one run's state."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.errors import ConfigError
from conf.run import CHECKPOINTS_DIR
from conf.training import CheckpointConfig
from training.checkpoint.files import (
    Layout,
    Seal,
    link_checkpoint,
    parse_standing,
    write_checkpoint,
)
from training.checkpoint.restore import restore_newest
from training.checkpoint.shelf import list_entries, place, prune, sweep
from training.checkpoint.state import (
    MODEL,
    OPTIMIZERS,
    State,
    collect_state,
    copy_state,
    find_non_finite,
)
from training.checkpoint.writer import BackgroundWriter
from training.disk_errors import disk_errors
from training.divergence import build_divergence_error
from training.models.base import RetrievalModel
from training.optimizers import Optimizers
from training.position import Position, Standing
from training.workers import Workers

LAST_DIR = "last"
BEST_DIR = "best"
WRITING = ".writing"

_log = logging.getLogger("sluice.training.checkpoint")


class Checkpoints:
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
        model: RetrievalModel,
        optimizers: Optimizers,
        config: CheckpointConfig | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._config = config or CheckpointConfig()
        self._workers = workers or Workers(tf.distribute.get_strategy())
        self._directory = run / CHECKPOINTS_DIR
        self._last, self._best = self._directory / LAST_DIR, self._directory / BEST_DIR
        self.state = collect_state(**{MODEL: model, OPTIMIZERS: optimizers})
        if self._workers.are_processes and self.state.saveables:
            raise ConfigError(
                "tables that grow are trained in one process",
                received=", ".join(self.state.saveables),
                fix="set devices.strategy=mirrored",
            )
        self.layout = describe_layout(self.state, model)
        self._writer = BackgroundWriter(self._config.asynchronous)
        self._unreadable: list[Path] = []
        self._saved: Position | None = None

    @property
    def newest_epoch(self) -> int:
        """Finished epochs of the newest checkpoint to resume from, readable or not; 0: none."""
        entries = list_entries(self._last)
        return entries[-1].position.epoch if entries else 0

    @property
    def saved(self) -> Position | None:
        """The position that was saved or restored last."""
        return self._saved

    def restore_last(self, tell: Callable[[str], None] = _log.warning) -> Standing | None:
        """Restores the newest readable checkpoint and returns where the run stood, if any.

        Args:
            tell: Receives a message for each damaged checkpoint that is passed over.

        Raises:
            InputDataError: No checkpoint fits the model and can be read.
        """
        found = self._workers.share(lambda: self._restore_last(tell))
        if found is None:
            return None
        self._workers.share_variables(self.state.variables.values())
        standing = parse_standing(found)
        self._saved = standing.position
        return standing

    def _restore_last(self, tell: Callable[[str], None]) -> dict[str, Any] | None:
        sweep(self._directory)
        seal, self._unreadable = restore_newest(self._last, self.state, tell)
        return None if seal is None else asdict(seal.standing)

    def save(self, standing: Standing, *, best: bool = False) -> None:
        """Copies the state and writes it, after the write before has ended.

        Args:
            standing: Where the run stands.
            best: Whether it is the best epoch so far.

        Raises:
            InternalError: This write or the one before failed.
            TrainingDivergedError: A saved number is not finite; nothing was written.
        """
        if not self._workers.is_chief:
            self._saved = standing.position
            return
        self._writer.wait()  # Two copies of the state are never held at once.
        tensors = copy_state(self.state)
        self._saved = standing.position
        self._writer.submit(lambda: self._write(tensors, Seal(standing, self.layout), best))

    def check(self) -> None:
        """Raises what a write in the background raised, if it has ended."""
        self._writer.check()

    def wait(self) -> None:
        """Waits until all that was saved is on the disk, and raises what the write raised."""
        self._writer.wait()

    def close(self) -> None:
        """Lets the write under way end; raises nothing."""
        self._writer.close()

    def _write(self, tensors: Mapping[str, tf.Tensor], seal: Seal, best: bool) -> None:
        position = seal.standing.position
        name = find_non_finite(tensors.items())
        if name is not None:
            raise build_divergence_error(f"{name} is not finite", position)
        writing = self._directory / WRITING
        with disk_errors(
            "cannot write a checkpoint; the one before is untouched",
            "free some space (or check the permissions), then go on with --resume",
        ):
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                sweep(self._directory)
                write_checkpoint(writing, tensors, seal)
                if best:
                    linked = writing.with_suffix(".best")
                    link_checkpoint(writing, linked)
                    place(linked, self._best, position)
                    prune(self._best, self._config.keep_best)
                # The last one comes last: it is what says that an epoch is done.
                place(writing, self._last, position)
                prune(self._last, self._config.keep_last, self._unreadable)
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)  # A full disk needs the room.
                raise
        self._unreadable = []


def describe_layout(state: State, model: RetrievalModel) -> Layout:
    """Returns which tensor holds which of a model's weights."""
    tables = {name: model.tables[name].rows for name in sorted(model.tables)}
    keys = {name: state.name_of_keys(rows) for name, rows in tables.items()}
    return Layout(
        {name: state.name_of(rows) for name, rows in tables.items()},
        tuple(state.name_of(variable) for variable in model.dense_variables),
        {name: found for name, found in keys.items() if found is not None},
    )
