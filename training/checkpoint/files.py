"""The files of one checkpoint: tensors as TensorFlow writes them, and a JSON file that seals them.

<directory>/state.index, state.data-…    tensors by name, for `tf.train.load_checkpoint`
            checkpoint.json              where the run stood; size and SHA-256 of each file
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.dataset import sync_directory, write_text_atomic
from conf.errors import InputDataError
from conf.schema import fingerprint
from training.position import EpochSums, Position, Standing

STATE_PREFIX = "state"
SEAL_FILE = "checkpoint.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """Which tensor is which, for a run that starts from this one with another vocabulary.

    Attributes:
        tables: Name of each embedding table's tensor by the table's name, in the order in which
            the optimizer lists its slots.
        dense: Names of the dense weights' tensors, in the optimizer's order.
        keys: Name of the tensor with the keys of each dynamic table's rows, by the table's name;
            the first key has row 2.
    """

    tables: Mapping[str, str]
    dense: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seal:
    """What `checkpoint.json` says.

    Attributes:
        standing: Where the run stood.
        layout: Which tensor is which.
    """

    standing: Standing
    layout: Layout


def write_checkpoint(directory: Path, tensors: Mapping[str, tf.Tensor], seal: Seal) -> None:
    """Writes a checkpoint into a directory that it makes, through to the disk.

    Raises:
        OSError: The disk is full, or there is no permission.
        tf.errors.OpError: The same, met by TensorFlow.
    """
    directory.mkdir(parents=True)
    names = list(tensors)
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(directory / STATE_PREFIX),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tensors[name] for name in names],
        )
    files = {}
    for file in sorted(directory.iterdir()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        files[file.name] = _describe_file(file)
    content = {
        "format_version": FORMAT_VERSION,
        "files": files,
        "standing": asdict(seal.standing),
        "layout": {
            "tables": list(seal.layout.tables.items()),
            "dense": list(seal.layout.dense),
            "keys": dict(seal.layout.keys),
        },
    }
    content["fingerprint"] = fingerprint(content)
    write_text_atomic(directory / SEAL_FILE, json.dumps(content, indent=1))


def read_checkpoint(directory: Path) -> Seal:
    """Reads what a checkpoint says of itself, and checks every byte of its files.

    Raises:
        InputDataError: A file is missing, cut short or changed.
    """
    try:
        content = json.loads((directory / SEAL_FILE).read_text(encoding="utf-8"))
        expected = content.pop("fingerprint")
        seal = _parse_seal(content)
        files = dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(directory / SEAL_FILE, repr(error)) from error
    if fingerprint(content) != expected:
        raise damaged(directory / SEAL_FILE, "it is not what was written")
    for name, wanted in files.items():
        try:
            found = _describe_file(directory / Path(name).name)
        except OSError as error:
            raise damaged(directory / name, error.strerror or repr(error)) from error
        if found != wanted:
            raise damaged(
                directory / name,
                f"{found['bytes']} bytes, SHA-256 {found['sha256'][:12]}",
                f"{wanted['bytes']} bytes, SHA-256 {wanted['sha256'][:12]}",
            )
    return seal


def damaged(file: Path, received: str, allowed: str | None = None) -> InputDataError:
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


def _parse_seal(content: Mapping[str, Any]) -> Seal:
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {content['format_version']}, not {FORMAT_VERSION}")
    layout = content["layout"]
    return Seal(
        parse_standing(content["standing"]),
        Layout(dict(layout["tables"]), tuple(layout["dense"]), dict(layout.get("keys", {}))),
    )


def parse_standing(content: Mapping[str, Any]) -> Standing:
    """Returns the standing that `dataclasses.asdict` made a mapping of."""
    parts = {
        "position": Position(**content["position"]),
        "sums": EpochSums(**content["sums"]),
    }
    return Standing(**{**content, **parts})


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
