"""Checkpoint files: tensors, resume state and checksums, written beside and moved into place.

<directory>/state.index, state.data-…    tensors by name, for `tf.train.load_checkpoint`
            rows-00000-of-00002.…        rows that worker 0 of 2 owns, of each matrix that is shared
            checkpoint.json              resume state; size and SHA-256 of each file

A checkpoint is written beside its siblings and moved among them by one rename: whatever is
listed was complete when it came there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from pydantic import TypeAdapter

from conf.artefacts.run import CHECKPOINT_FILE
from conf.errors import ConfigError, InputDataError
from conf.json_text import parse_json
from conf.schema import fingerprint
from conf.storage.atomic_output import sync_directory, write_text_atomic
from training.embedding.key_index import FIRST_ROW
from training.embedding.worker_rows import RowOwners

STATE_PREFIX = "state"
_WRITTEN_SUFFIX = ".written"
_ENTRY = re.compile(r"([0-9]{5,})-([0-9]{9,})(?:\.([0-9]+))?")
_ROWS_INDEX = re.compile(r"rows-([0-9]{5})-of-([0-9]{5})\.index")


@dataclass(frozen=True, order=True)
class Position:
    """The batch that training reads next: a zero-based epoch, and a zero-based batch of it.

    A batch of the number of steps per epoch stands for an epoch that is trained and not validated.
    """

    epoch: int
    batch: int

    def step(self, steps_per_epoch: int) -> int:
        """Returns the number of steps before this position, over all epochs."""
        return self.epoch * steps_per_epoch + self.batch


@dataclass(frozen=True)
class EpochSums:
    """Sums over the steps of an epoch that are done."""

    loss: float = 0.0
    wait_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class ResumeState:
    """What a bit-exact resume needs besides the variables.

    Every draw of training is a function of the seed and of a counter: the epoch for the order of
    records, the optimizers' step, which is one of the variables, for dropout and negatives.
    """

    position: Position
    sums: EpochSums
    seed: int

    def after(self, steps: int, loss: float, wait_s: float, seconds: float) -> ResumeState:
        """Returns the state some steps further in the same epoch, given their sums."""
        position, before = replace(self.position, batch=self.position.batch + steps), self.sums
        sums = EpochSums(before.loss + loss, before.wait_s + wait_s, before.seconds + seconds)
        return ResumeState(position, sums, self.seed)


@dataclass(frozen=True)
class CheckpointLayout:
    """Names of tensors, for a run that starts from this one with another vocabulary.

    Of tables by their names, and of dense weights, both in the order of the optimizer's slots; of
    `frozen` tables it has none. `keys` are those of dynamic tables: the first key has row 2.
    """

    tables: Mapping[str, str]
    dense: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @property
    def trained_tables(self) -> list[str]:
        """The tables that the optimizer has slots of, in its order."""
        return [name for name in self.tables if name not in self.frozen]


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint says of itself: where the run was, and which tensor is which."""

    resume_state: ResumeState
    layout: CheckpointLayout


_METADATA = TypeAdapter(CheckpointMetadata)
parse_resume_state = TypeAdapter(ResumeState).validate_python


def name_part(owners: RowOwners) -> str:
    """Returns the name of the files of a worker's rows, without suffix."""
    return f"rows-{owners.index:05d}-of-{owners.count:05d}"


def write_part(
    directory: Path,
    owners: RowOwners,
    own: Mapping[str, tf.Tensor],
    common: Mapping[str, tf.Tensor],
) -> None:
    """Writes what one worker has of a checkpoint, and a marker that says that it is there.

    That is the rows that it owns, by matrix, and on the chief what all have alike.
    """
    directory.mkdir(parents=True, exist_ok=True)
    part = name_part(owners)
    files: dict[str, Any] = {}
    for prefix, tensors in ((part, own), (STATE_PREFIX, common)):
        if tensors:
            written = _write_tensors(directory, prefix, tensors)
            files |= {file.name: _describe_file(file) for file in written}
    write_text_atomic(directory / f"{part}{_WRITTEN_SUFFIX}", json.dumps(files))


def _write_tensors(directory: Path, prefix: str, tensors: Mapping[str, tf.Tensor]) -> list[Path]:
    """Writes tensors through to the disk, as files of a prefix."""
    names = list(tensors)
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(directory / prefix),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tensors[name] for name in names],
        )
    files = sorted(directory.glob(f"{prefix}.*"))
    for file in files:
        _sync(file)
    return files


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def seal_checkpoint(directory: Path, workers: int, metadata: CheckpointMetadata) -> None:
    """Makes a checkpoint of what so many workers have written, each by `write_part`."""
    files: dict[str, Any] = {}
    for index in range(workers):
        written = directory / f"{name_part(RowOwners(index, workers))}{_WRITTEN_SUFFIX}"
        if not written.is_file():
            raise ConfigError(
                "a worker has written its rows where the chief does not see them",
                received=f"no {written}",
                fix="set root to a directory on storage that all workers have under one path",
            )
        files |= json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
    content: dict[str, Any] = {"files": dict(sorted(files.items())), **asdict(metadata)}
    content["fingerprint"] = fingerprint(content)
    write_text_atomic(directory / CHECKPOINT_FILE, json.dumps(content, indent=1))


def read_checkpoint(directory: Path) -> CheckpointMetadata:
    """Reads what a checkpoint says of itself, and checks every byte of its files."""
    seal = directory / CHECKPOINT_FILE
    try:
        content = parse_json(seal.read_text(encoding="utf-8"))
        expected = content.pop("fingerprint")
        metadata, files = _METADATA.validate_python(content), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _build_damaged_error(seal, repr(error)) from error
    if fingerprint(content) != expected:
        raise _build_damaged_error(seal, "it is not what was written")
    for name, wanted in files.items():
        file = directory / Path(name).name
        try:
            found = _describe_file(file)
        except OSError as error:
            raise _build_damaged_error(file, error.strerror or repr(error)) from error
        if found != wanted:
            raise _build_damaged_error(file, *map(_render_file, (found, wanted)))
    return metadata


def _describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"bytes": handle.tell(), "sha256": digest}


def _render_file(described: Mapping[str, Any]) -> str:
    return f"{described['bytes']} bytes, SHA-256 {described['sha256'][:12]}"


def _build_damaged_error(file: Path, received: str, allowed: str | None = None) -> InputDataError:
    return InputDataError(
        "a checkpoint is damaged",
        received=f"{file}: {received}",
        allowed=allowed,
        fix="restore the file, use another checkpoint, or train again without --resume",
    )


def count_parts(directory: Path) -> int:
    """Returns how many workers' rows are in files of their own, by the seal; 0: none are."""
    try:
        files = json.loads((directory / CHECKPOINT_FILE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):  # Not sealed: whoever reads it says what is missing.
        return 0
    counts = [int(match[2]) for name in files if (match := _ROWS_INDEX.fullmatch(name))]
    return max(counts, default=0)


class CheckpointTensors:
    """A reader as that of `tf.train.load_checkpoint`, of tensors in parts as a whole."""

    def __init__(self, prefix: Path) -> None:
        directory = prefix.parent
        self._state = tf.train.load_checkpoint(str(prefix))
        count = count_parts(directory)
        self._owners = [RowOwners(index, count) for index in range(count)]
        self._parts = [
            tf.train.load_checkpoint(str(directory / name_part(owner))) for owner in self._owners
        ]
        shapes = [part.get_variable_to_shape_map() for part in self._parts]
        self._shapes: dict[str, list[int]] = {}
        for name, (_, *row) in (shapes[0] if shapes else {}).items():
            own = sum(found[name][0] - FIRST_ROW for found in shapes)
            self._shapes[name] = [FIRST_ROW + own, *row]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        return {**self._state.get_variable_to_shape_map(), **self._shapes}

    def get_variable_to_dtype_map(self) -> dict[str, tf.DType]:
        of_rows = self._parts[0].get_variable_to_dtype_map() if self._parts else {}
        return {**self._state.get_variable_to_dtype_map(), **of_rows}

    def get_tensor(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            return self._state.get_tensor(name)
        return self.read_rows(name, RowOwners(0, 1))

    def read_rows(self, name: str, owners: RowOwners) -> np.ndarray:
        """Returns the rows of a matrix that a worker owns, however many workers have written it.

        `[rows, dim]`, in the order of `RowOwners.list_rows`, of the workers that are now.
        """
        if name not in self._shapes:
            whole = self._state.get_tensor(name)
            return whole[owners.list_rows(len(whole))]
        if owners in self._owners:
            return self._parts[owners.index].get_tensor(name)
        rows, *row = self._shapes[name]
        wanted = owners.list_rows(rows)
        dtype = self._parts[0].get_variable_to_dtype_map()[name].as_numpy_dtype
        found = np.empty((len(wanted), *row), dtype)
        for owner, reader in zip(self._owners, self._parts, strict=True):
            part = reader.get_tensor(name)
            found[:FIRST_ROW] = part[:FIRST_ROW]
            is_there = owner.find_owners(wanted) == owner.index
            is_there[:FIRST_ROW] = False
            found[is_there] = part[owner.to_local(wanted[is_there])]
        return found


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """One checkpoint of a directory; `attempt` counts savings of a position, by resumed runs."""

    position: Position
    attempt: int
    path: Path


def list_checkpoints(directory: Path) -> list[CheckpointEntry]:
    """Returns the checkpoints of a directory, oldest first; one that does not exist has none."""
    if not directory.is_dir():
        return []
    checkpoints = []
    for path in directory.iterdir():
        match = _ENTRY.fullmatch(path.name)
        if match and path.is_dir():
            epoch, batch, attempt = map(int, match.groups(default="0"))
            checkpoints.append(CheckpointEntry(Position(epoch, batch), attempt, path))
    return sorted(checkpoints)


def publish_checkpoint(written: Path, directory: Path, position: Position) -> Path:
    """Moves a written checkpoint into a directory of checkpoints and returns its path.

    One of the same position stays until `prune_checkpoints`: there is no moment without either.
    """
    directory.mkdir(parents=True, exist_ok=True)
    attempts = [e.attempt for e in list_checkpoints(directory) if e.position == position]
    suffix = f".{max(attempts) + 1}" if attempts else ""
    target = directory / f"{position.epoch:05d}-{position.batch:09d}{suffix}"
    written.rename(target)
    sync_directory(directory)
    return target


def link_checkpoint(source: Path, target: Path) -> None:
    """Makes a second checkpoint of the same files, which take no more space where links work."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:  # A file system without hard links.
            _sync(Path(shutil.copyfile(file, target / file.name)))
    sync_directory(target)


def prune_checkpoints(directory: Path, keep: int, unreadable: Collection[Path] = ()) -> None:
    """Removes all but the newest checkpoints, and those that cannot be read."""
    entries = list_checkpoints(directory)
    newest = {entry.position: entry for entry in entries if entry.path not in unreadable}
    kept = {newest[position].path for position in sorted(newest)[-keep:]}
    for entry in entries:
        if entry.path not in kept:
            remove_checkpoint(entry.path)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; killed in between, it leaves nothing that looks like one."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed run left half written or half removed."""
    for path in directory.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
