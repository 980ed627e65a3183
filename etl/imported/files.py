"""The files that are imported: found by their patterns, and unchanged while they are read."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

from conf.errors import InputDataError
from conf.etl.imported import ImportConfig
from conf.local_paths import is_hidden, local_path
from conf.manifest import InputFile
from etl.tfrecord.commit.output_directory import list_complete

Files = Mapping[str, tuple[InputFile, ...]]
"""The files of each split, in the order of their names."""


def find_files(config: ImportConfig) -> Files:
    """Lists the files of each split; hidden ones (`.` or `_` in front) do not count.

    Raises:
        InputDataError: A path names no file, a file is in two splits, or a folder lacks one that
            its manifest lists.
    """
    root = local_path(config.data_dir)
    inputs: dict[str, tuple[InputFile, ...]] = {
        split: tuple(
            _describe_input(split, path)
            for path in sorted({file for name in names for file in _expand(root, split, name)})
        )
        for split, names in config.splits.items()
    }
    seen: dict[str, str] = {}
    for split, listed in inputs.items():
        for file in listed:
            if seen.setdefault(file.path, split) != split:
                raise InputDataError(
                    f"a file is in the splits {seen[file.path]} and {split}",
                    received=file.path,
                    fix="correct the globs of `splits`",
                )
    return inputs


def _expand(root: Path, split: str, name: str) -> list[Path]:
    asked = Path(local_path(name))
    path = root / asked
    matches = [path] if path.exists() else _match_visible(root, asked)
    files = [
        file
        for match in matches
        for file in ([match / name for name in list_complete(match)] if match.is_dir() else [match])
    ]
    kept = [file.resolve() for file in files if file.is_file()]
    if not kept:
        raise InputDataError(
            f"split {split}: no such file",
            received=path,
            allowed="a file, a folder or a glob; names with . or _ in front do not count",
            fix=f"correct splits.{split}, or give the folder by --data",
        )
    return kept


def _match_visible(root: Path, asked: Path) -> list[Path]:
    """Returns what a glob matches, without files in hidden folders that it does not name."""
    paths = [Path(name) for name in glob.glob(str(asked), root_dir=root, recursive=True)]  # noqa: PTH207
    return [
        root / path
        for path in paths
        if not any(
            is_hidden(part, is_folder=part != path.name)
            for part in path.parts
            if part not in asked.parts
        )
    ]


def _describe_input(split: str, path: Path) -> InputFile:
    stat = path.stat()
    state = f"{stat.st_mtime_ns}.{stat.st_ino}"
    return InputFile(split, str(path), stat.st_size, stat.st_mtime_ns // 1_000_000, state)


def check_unchanged(files: Files) -> None:
    """Refuses files that are not as they were when they were listed.

    Raises:
        InputDataError: One has changed.
    """
    for listed in files.values():
        for file in listed:
            if _describe_input(file.source, Path(file.path)) != file:
                raise InputDataError(
                    "a file was written while it was imported",
                    received=file.path,
                    fix="wait until the program that writes it has ended, and import again",
                )
