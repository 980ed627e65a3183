"""Tensors of a checkpoint, wherever they lie: in its one file, or in a file of each worker.

    state.index, state.data-…                     what all workers have alike
    rows-00000-of-00002.index, ….data-…           rows that worker 0 of 2 owns, of each matrix

A matrix in parts is read as a whole under its name, so a reader need not know of workers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from conf.artefacts.run import CHECKPOINT_FILE
from training.embedding.key_index import FIRST_ROW
from training.embedding.worker_rows import RowOwners

STATE_PREFIX = "state"
_ROWS_PREFIX = "rows-{:05d}-of-{:05d}"
_ROWS_INDEX = re.compile(r"rows-([0-9]{5})-of-([0-9]{5})\.index")


def name_part(owners: RowOwners) -> str:
    """Returns the name of the files of a worker's rows, without suffix."""
    return _ROWS_PREFIX.format(owners.index, owners.count)


def write_tensors(directory: Path, prefix: str, tensors: Mapping[str, tf.Tensor]) -> list[Path]:
    """Writes tensors through to the disk and returns the files.

    Args:
        directory: An existing directory.
        prefix: Name of the files without suffix.
        tensors: By name.
    """
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
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    return files


def count_parts(directory: Path) -> int:
    """Returns how many workers' rows are in files of their own; 0: none are.

    The seal says so: what else lies in the directory is not of the checkpoint.
    """
    try:
        files = json.loads((directory / CHECKPOINT_FILE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):  # Not sealed: whoever reads it says what is missing.
        return 0
    counts = [int(match[2]) for name in files if (match := _ROWS_INDEX.fullmatch(name))]
    return max(counts, default=0)


class CheckpointTensors:
    """Reads the tensors of a checkpoint by name, those in parts as a whole.

    Its methods are those of `tf.train.load_checkpoint`'s reader.

    Args:
        prefix: Path of the tensors that no worker owns, without suffix.
    """

    def __init__(self, prefix: Path) -> None:
        directory = prefix.parent
        self._state = tf.train.load_checkpoint(str(prefix))
        count = count_parts(directory)
        self._owners = [RowOwners(index, count) for index in range(count)]
        self._parts = [
            tf.train.load_checkpoint(str(directory / name_part(owner))) for owner in self._owners
        ]
        shapes = [part.get_variable_to_shape_map() for part in self._parts]
        self._rows = {
            name: FIRST_ROW + sum(found[name][0] - FIRST_ROW for found in shapes)
            for name in (shapes[0] if shapes else {})
        }

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of each tensor."""
        shapes = dict(self._state.get_variable_to_shape_map())
        for name, rows in self._rows.items():
            shapes[name] = [rows, *self._parts[0].get_variable_to_shape_map()[name][1:]]
        return shapes

    def get_variable_to_dtype_map(self) -> dict[str, tf.DType]:
        """Returns the type of each tensor."""
        dtypes = dict(self._state.get_variable_to_dtype_map())
        of_rows = self._parts[0].get_variable_to_dtype_map() if self._parts else {}
        return {**dtypes, **of_rows}

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns a tensor."""
        if name not in self._rows:
            return self._state.get_tensor(name)
        return self.read_rows(name, RowOwners(0, 1))

    def read_rows(self, name: str, owners: RowOwners) -> np.ndarray:
        """Returns the rows of a matrix that a worker owns, however many workers have written it.

        Args:
            name: Its name.
            owners: The worker, of those that are now.

        Returns:
            `[rows, dim]`, in the order of `RowOwners.list_rows`.
        """
        if name not in self._rows:
            whole = self._state.get_tensor(name)
            return whole[owners.list_rows(len(whole))]
        if owners in self._owners:
            return self._parts[owners.index].get_tensor(name)
        wanted = owners.list_rows(self._rows[name])
        found: np.ndarray | None = None
        for owner, reader in zip(self._owners, self._parts, strict=True):
            part = reader.get_tensor(name)
            if found is None:
                found = np.empty((len(wanted), *part.shape[1:]), part.dtype)
                found[:FIRST_ROW] = part[:FIRST_ROW]
            is_there = owner.find_owners(wanted) == owner.index
            is_there[:FIRST_ROW] = False
            found[is_there] = part[owner.to_local(wanted[is_there])]
        if found is None:
            raise ValueError(f"no worker has written {name}")
        return found
