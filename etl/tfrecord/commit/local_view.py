"""What an output directory of a file system holds; looked at anew with each question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.errors import ConfigError, InputDataError
from conf.local_paths import list_data_files
from etl.tfrecord.commit.commit_plan import SUCCESS_FILE
from etl.tfrecord.commit.file_replacement import is_publishing
from etl.tfrecord.commit.output_manifest import (
    COMMIT_FILE,
    OutputManifest,
    read_output_manifest,
)
from etl.tfrecord.files.data_files import digest_partitions, refuse_missing


@dataclass(frozen=True)
class LocalView:
    """A `DirectoryView` of a file system.

    Attributes:
        root: The directory; need not exist.
    """

    root: Path

    @property
    def holds_output(self) -> bool:
        """Whether it holds the output of a job, also of one that wrote no row."""
        marked = any((self.root / name).exists() for name in (SUCCESS_FILE, COMMIT_FILE))
        return marked or bool(self.data_keys)

    @property
    def committed(self) -> OutputManifest | None:
        """Its manifest.

        Raises:
            InputDataError: It is damaged.
        """
        return read_output_manifest(self.root)

    @property
    def data_keys(self) -> Sequence[str]:
        """Every shard by its path."""
        return list_data_files(self.root)

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Jobs that the manifest names; none where it is damaged, as only messages name them."""
        try:
            committed = self.committed
        except InputDataError:
            return ()
        return () if committed is None else committed.job_ids

    def digest_partitions(self) -> Mapping[str, str]:
        """Digest of the shards by partition directory, "" for the root."""
        return digest_partitions(self.root)


def refuse_publishing(directory: Path) -> None:
    """Refuses to read a directory while a write publishes there, or after it was killed.

    Raises:
        InputDataError: One does, or was.
    """
    if is_publishing(directory):
        raise InputDataError(
            "the files are no complete set: a write is publishing there, or was killed",
            received=directory,
            fix="wait for it to end; after a kill, the next write restores the earlier files",
        )


def list_complete(root: Path) -> list[str]:
    """Lists the data files of a directory, relative to it, where none of them is missing.

    Raises:
        InputDataError: A file that its manifest lists is gone, or a write is publishing there.
    """
    refuse_publishing(root)
    found, committed = list_data_files(root), read_output_manifest(root)
    if committed is not None:
        refuse_missing(root, [shard.path for shard in committed.shards], found)
    return found


def view_local(root: Path) -> LocalView:
    """Returns the view of a directory.

    Raises:
        ConfigError: It is a file.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(
            "the output is a file, not a directory",
            received=root,
            fix="remove the file, or write elsewhere",
        )
    return LocalView(root)
