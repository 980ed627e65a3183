"""Checkpoint files: tensors, resume state and checksums, written beside and moved into place.

<directory>/state.index, state.data-…    tensors by name, for `tf.train.load_checkpoint`
            rows-00000-of-00002.…        tensors of the rows that a worker owns, where they do
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.run import CHECKPOINT_FILE
from conf.errors import InputDataError
from conf.json_text import parse_json
from conf.schema import fingerprint
from conf.storage.atomic_output import sync_directory, write_text_atomic
from training.checkpoint.checkpoint_tensors import STATE_PREFIX, write_tensors
from training.checkpoint.resume_state import Position, ResumeState, parse_resume_state

FORMAT_VERSION = 1


@dataclass(frozen=True)
class CheckpointLayout:
    """Which tensor is which, for a run that starts from this one with another vocabulary.

    Attributes:
        tables: Name of each embedding table's tensor by the table's name, in the order in which
            the optimizer lists its slots.
        dense: Names of the dense weights' tensors, in the optimizer's order.
        keys: Name of the tensor with the keys of each dynamic table's rows, by the table's name;
            the first key has row 2.
        frozen: Names of tables that are not trained, which the optimizer has no slots of.
    """

    tables: Mapping[str, str]
    dense: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @property
    def trained_tables(self) -> dict[str, str]:
        """The tables that the optimizer has slots of, as `tables`."""
        return {name: found for name, found in self.tables.items() if name not in self.frozen}


@dataclass(frozen=True)
class CheckpointMetadata:
    """The content of `checkpoint.json`.

    Attributes:
        resume_state: Where the run was.
        layout: Which tensor is which.
    """

    resume_state: ResumeState
    layout: CheckpointLayout


def write_checkpoint(
    directory: Path, tensors: Mapping[str, tf.Tensor], metadata: CheckpointMetadata
) -> None:
    """Writes a checkpoint into a directory that it makes, through to the disk.

    Raises:
        OSError: The disk is full, or there is no permission.
        tf.errors.OpError: The same, met by TensorFlow.
    """
    directory.mkdir(parents=True)
    seal_checkpoint(directory, write_files(directory, STATE_PREFIX, tensors), metadata)


def write_files(
    directory: Path, prefix: str, tensors: Mapping[str, tf.Tensor]
) -> dict[str, dict[str, Any]]:
    """Writes tensors of a checkpoint; returns size and SHA-256 of each file by its name.

    Args:
        directory: An existing directory.
        prefix: Name of the files without suffix.
        tensors: By name.
    """
    return {file.name: _describe_file(file) for file in write_tensors(directory, prefix, tensors)}


def seal_checkpoint(
    directory: Path, files: Mapping[str, Mapping[str, Any]], metadata: CheckpointMetadata
) -> None:
    """Writes what makes files a checkpoint.

    Args:
        directory: Where they are.
        files: What `write_files` has returned of all of them.
        metadata: What the checkpoint says of itself.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "files": dict(sorted(files.items())),
        "standing": asdict(metadata.resume_state),
        "layout": {
            "tables": list(metadata.layout.tables.items()),
            "dense": list(metadata.layout.dense),
            "keys": dict(metadata.layout.keys),
            "frozen": list(metadata.layout.frozen),
        },
    }
    content["fingerprint"] = fingerprint(content)
    write_text_atomic(directory / CHECKPOINT_FILE, json.dumps(content, indent=1))


def read_checkpoint(directory: Path) -> CheckpointMetadata:
    """Reads what a checkpoint says of itself, and checks every byte of its files.

    Raises:
        InputDataError: A file is missing, cut short or changed.
    """
    try:
        content = parse_json((directory / CHECKPOINT_FILE).read_text(encoding="utf-8"))
        expected = content.pop("fingerprint")
        metadata = _parse_metadata(content)
        files = dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise build_damaged_error(directory / CHECKPOINT_FILE, repr(error)) from error
    if fingerprint(content) != expected:
        raise build_damaged_error(directory / CHECKPOINT_FILE, "it is not what was written")
    for name, wanted in files.items():
        try:
            described = _describe_file(directory / Path(name).name)
        except OSError as error:
            raise build_damaged_error(directory / name, error.strerror or repr(error)) from error
        if described != wanted:
            raise build_damaged_error(
                directory / name,
                f"{described['bytes']} bytes, SHA-256 {described['sha256'][:12]}",
                f"{wanted['bytes']} bytes, SHA-256 {wanted['sha256'][:12]}",
            )
    return metadata


def build_damaged_error(file: Path, received: str, allowed: str | None = None) -> InputDataError:
    """Returns the error that names a damaged file of a checkpoint."""
    return InputDataError(
        "a checkpoint is damaged",
        received=f"{file}: {received}",
        allowed=allowed,
        fix="restore the file, use another checkpoint, or train again without --resume",
    )


def _describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"bytes": handle.tell(), "sha256": digest}


def _parse_metadata(content: Mapping[str, Any]) -> CheckpointMetadata:
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {content['format_version']}, not {FORMAT_VERSION}")
    layout = content["layout"]
    return CheckpointMetadata(
        parse_resume_state(content["standing"]),
        CheckpointLayout(
            dict(layout["tables"]),
            tuple(layout["dense"]),
            dict(layout.get("keys", {})),
            tuple(layout.get("frozen", ())),
        ),
    )


def link_checkpoint(source: Path, target: Path) -> None:
    """Makes a second checkpoint of the same files, which take no more space where links work."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:  # A file system without hard links.
            (target / file.name).write_bytes(file.read_bytes())
            with (target / file.name).open("rb") as handle:
                os.fsync(handle.fileno())
    sync_directory(target)


ENTRY_PATTERN = re.compile(r"([0-9]{5,})-([0-9]{9,})(?:\.([0-9]+))?")
LEFTOVER_PREFIX = "."


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """One checkpoint.

    Attributes:
        position: The batch that its run reads next.
        attempt: 0, or how often the position had been saved before, which a run does that went
            on from an older checkpoint.
        path: Its folder.
    """

    position: Position
    attempt: int
    path: Path


def list_checkpoints(directory: Path) -> list[CheckpointEntry]:
    """Returns the checkpoints of a directory, oldest first; one that does not exist has none."""
    if not directory.is_dir():
        return []
    checkpoints = []
    for path in directory.iterdir():
        match = ENTRY_PATTERN.fullmatch(path.name)
        if match and path.is_dir():
            epoch, batch, attempt = match.groups(default="0")
            checkpoints.append(
                CheckpointEntry(Position(int(epoch), int(batch)), int(attempt), path)
            )
    return sorted(checkpoints)


def publish_checkpoint(written: Path, directory: Path, position: Position) -> Path:
    """Moves a written checkpoint into a directory of checkpoints and returns its path.

    One of the same position stays until `prune`: there is no moment without either.
    """
    directory.mkdir(parents=True, exist_ok=True)
    attempts = [
        entry.attempt for entry in list_checkpoints(directory) if entry.position == position
    ]
    suffix = f".{max(attempts) + 1}" if attempts else ""
    target = directory / f"{position.epoch:05d}-{position.batch:09d}{suffix}"
    written.rename(target)
    sync_directory(directory)
    return target


def prune_checkpoints(directory: Path, keep: int, unreadable: Collection[Path] = ()) -> None:
    """Removes all but the newest checkpoints.

    Args:
        directory: The directory.
        keep: How many to keep.
        unreadable: Checkpoints to remove in any case.
    """
    entries = list_checkpoints(directory)
    newest = {entry.position: entry for entry in entries if entry.path not in unreadable}
    kept = {newest[position].path for position in sorted(newest)[-keep:]}
    for entry in entries:
        if entry.path not in kept:
            remove_checkpoint(entry.path)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; killed in between, it leaves nothing that looks like one."""
    hidden = path.with_name(f"{LEFTOVER_PREFIX}{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed run left half written or half removed."""
    for path in directory.glob(f"{LEFTOVER_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
