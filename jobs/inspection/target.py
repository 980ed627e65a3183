"""Tells what a path names: a dataset version, a shard or a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conf.dataset import VERSIONS_DIR, find_version, local_path, resolve_version
from conf.errors import UpstreamNotReadyError
from conf.manifest import MANIFEST_FILE
from conf.pointer import CURRENT_FILE
from conf.run import RUN_CARD_FILE, RUNS_DIR, resolve_run
from jobs.inspection.files import list_record_files

Kind = Literal["dataset", "shard", "files", "run"]


@dataclass(frozen=True)
class Target:
    """What a path names.

    Attributes:
        kind: A dataset version, a shard file, a directory of TFRecord files, or a run.
        path: The version's, files' or run's directory, or the shard's file.
        version: For a shard, the dataset version that it lies in, or None.
    """

    kind: Kind
    path: Path
    version: Path | None = None


def find_target(path: str) -> Target:
    """Finds what a path names; a dataset or a series of runs stands for its current one.

    Raises:
        UpstreamNotReadyError: There is nothing there, or nothing has been published there yet.
        InputDataError: `CURRENT` names something that does not exist.
    """
    place = local_path(path)
    if place.name in (MANIFEST_FILE, RUN_CARD_FILE) and place.is_file():
        place = place.parent
    if place.is_file():
        return Target("shard", place, find_version(place))
    if (place / RUN_CARD_FILE).is_file() or (place / RUNS_DIR).is_dir():
        return Target("run", resolve_run(str(place)))
    is_dataset = (place / MANIFEST_FILE).is_file() or (place / CURRENT_FILE).is_file()
    if is_dataset or (place / VERSIONS_DIR).is_dir():
        return Target("dataset", resolve_version(place))
    if place.is_dir() and list_record_files(place):
        return Target("files", place)
    raise UpstreamNotReadyError(
        "there is nothing here to inspect",
        received=place if place.exists() else f"{place} (does not exist)",
        allowed="a dataset, one of its versions, a run, TFRecord files or one of them",
        fix="correct the path, or run `sluice build` or `sluice train` first",
    )
