"""Which files a source has: what Spark would skip is not listed, and nothing is listed twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.errors import InputDataError
from conf.etl import SourceConfig
from conf.provenance import InputFile
from etl.sources.files import count_levels, find_changes, find_files


def found(path: str, data_dir: Path) -> list[str]:
    config = SourceConfig.model_validate(
        {"path": path, "columns": [{"name": "id", "type": "int64"}]}
    )
    files = find_files("log", config, str(data_dir))
    return [Path(file.path).relative_to(data_dir.resolve()).as_posix() for file in files]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")


def test_hidden_folders_and_files_of_a_directory_are_left_out(tmp_path):
    write(tmp_path, "d/part-0", "d/x/part-1", "d/_temporary/0/part-2", "d/x/.git/part-3")
    write(tmp_path, "d/_SUCCESS", "d/.part-0.crc", "d/part-4._COPYING_")
    assert found("d", tmp_path) == ["d/part-0", "d/x/part-1"]


def test_a_directory_below_a_hidden_folder_can_be_named(tmp_path):
    write(tmp_path, "_raw/d/part-0")
    assert found("_raw/d", tmp_path) == ["_raw/d/part-0"]
    assert found("_raw/d/*", tmp_path) == ["_raw/d/part-0"]


def test_hidden_matches_of_a_glob_are_left_out(tmp_path):
    write(tmp_path, "a/x.dat", "a/_x.dat", "_b/x.dat")
    assert found("*/*.dat", tmp_path) == ["a/x.dat"]
    with pytest.raises(InputDataError, match="no such file"):
        found("a/_*.dat", tmp_path)


def test_a_hidden_file_asked_for_by_name_is_refused(tmp_path):
    write(tmp_path, "_x.dat")
    (tmp_path / "x.dat").symlink_to(tmp_path / "_x.dat")
    for name in ("_x.dat", "x.dat"):
        with pytest.raises(InputDataError, match="hidden"):
            found(name, tmp_path)


def test_a_file_reached_by_a_link_counts_once(tmp_path):
    write(tmp_path, "d/a.dat")
    (tmp_path / "d" / "b.dat").symlink_to(tmp_path / "d" / "a.dat")
    assert found("d", tmp_path) == ["d/a.dat"]
    assert found("d/*.dat", tmp_path) == ["d/a.dat"]


def test_glob_characters_in_the_folder_and_in_a_file_name_are_literal(tmp_path):
    folder = tmp_path / "run[1]"
    write(folder, "a[2].dat", "b.dat", "a2.dat")
    assert found("a[2].dat", folder) == ["a[2].dat"]
    assert found("*.dat", folder) == ["a2.dat", "a[2].dat", "b.dat"]


def test_file_uris_are_paths(tmp_path):
    write(tmp_path, "a b.dat", "d/c.dat")
    uri = tmp_path.resolve().as_uri()
    assert found(f"{uri}/a%20b.dat", tmp_path) == ["a b.dat"]
    assert found(f"{uri}/d/*.dat", tmp_path) == ["d/c.dat"]


@pytest.mark.parametrize(
    ("names", "levels"), [(["a"], 1), (["a", "b"], 1), (["x/a", "y/a"], 2), (["a", "x/y/a"], 3)]
)
def test_levels_are_what_tells_paths_apart(tmp_path, names, levels):
    write(tmp_path, *names)
    config = SourceConfig.model_validate(
        {"path": ".", "columns": [{"name": "id", "type": "int64"}]}
    )
    files = find_files("log", config, str(tmp_path))
    assert count_levels(files) == levels
    tails = {Path(file.path).parts[-levels:] for file in files}
    assert len(tails) == len(names)


def test_what_became_of_files_since_they_were_listed(tmp_path):
    write(tmp_path, "d/same", "d/gone", "d/longer", "d/swapped", "d/touched")
    config = SourceConfig.model_validate(
        {"path": "d", "columns": [{"name": "id", "type": "int64"}]}
    )
    before = find_files("log", config, str(tmp_path))

    def changes(files: tuple[InputFile, ...] = before) -> list[str]:
        found = find_changes("log", config, str(tmp_path), files)
        return [change.replace(f"{tmp_path.resolve()}/d/", "") for change in found]

    assert changes() == []
    (tmp_path / "d" / "gone").unlink()
    (tmp_path / "d" / "longer").write_text("1\n2\n")
    os.utime(tmp_path / "d" / "touched", (1, 1))
    stat = (tmp_path / "d" / "swapped").stat()
    (tmp_path / "d" / "swapped").write_text("9\n")
    os.utime(tmp_path / "d" / "swapped", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write(tmp_path, "d/new", "d/_hidden")
    assert changes() == [
        "gone is gone",
        "longer was written (2 bytes before, 4 now)",
        "new is new",
        "swapped was written (2 bytes before, 2 now)",
        "touched was written (2 bytes before, 2 now)",
    ]
    for file in (tmp_path / "d").iterdir():
        file.unlink()
    assert changes(before[:1]) == ["gone is gone"]
