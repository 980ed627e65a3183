"""Replacing files: whatever the moment of a kill, one complete set survives it."""

import contextlib
from pathlib import Path

import pytest

from conf.errors import InputDataError
from conf.local_paths import list_data_files
from etl.tfrecord.commit import file_replacement
from etl.tfrecord.commit.file_replacement import (
    ReplacementPlan,
    is_publishing,
    lock_directory,
    recover_interrupted,
    replace_files,
)
from etl.tfrecord.spark.input_files import list_input_files
from etl.tfrecord.spark.options import parse_read_options
from tests.etl.killed_process import Killed, kill_after

OLD = {
    "_SUCCESS": "", "_commit": "old", "part-0": "old 0", "part-1": "old 1", "d=1/c=2/p": "old p",
    "_index/d=1/p": "old index",
}  # fmt: skip
NEW = {
    "_SUCCESS": "", "_commit": "new", "part-0": "new 0", "part-2": "new 2", "d=1/c=3/p": "new p",
    "e=1/p": "new e",
}  # fmt: skip
PLAN = ReplacementPlan(list(OLD), [name for name in NEW if name != "_SUCCESS"])


def content(root: Path) -> dict[str, str]:
    """Files by path, those out of sight left out."""
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and not str(path.relative_to(root)).startswith((".", "_publ", "_repl"))
    }


def fill(root: Path) -> None:
    for name, text in OLD.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def run_replacement(root: Path) -> None:
    with replace_files(root, "j", PLAN):
        for name in PLAN.new:
            staged = root.with_name(f"{root.name}.staged")
            staged.write_text(NEW[name])
            staged.replace(root / name)


@pytest.mark.parametrize("undo_calls", [0, 2, 5, 8])
def test_killed_at_any_step_the_next_writer_finds_one_complete_set(
    tmp_path, monkeypatch, undo_calls
):
    outcomes = []
    for step in range(100):
        root = tmp_path / str(step)
        root.mkdir()
        fill(root)
        with monkeypatch.context() as patch:
            kill_after(step, patch)
            patch.setattr(file_replacement, "recover_interrupted", lambda directory: None)
            try:
                run_replacement(root)
                killed = False
            except Killed:
                killed = True
        if is_publishing(root):
            with pytest.raises(InputDataError, match="no complete set"):
                list_input_files(parse_read_options({"path": str(root)}))
        if (root / "_SUCCESS").exists():  # what readers may trust is one set, in full
            assert content(root) in (OLD, NEW)
        with monkeypatch.context() as patch:  # the one who settles is killed as well
            kill_after(undo_calls, patch)
            with contextlib.suppress(Killed):
                recover_interrupted(root)
        recover_interrupted(root)
        visible = content(root)
        outcomes.append(visible)
        assert visible in (OLD, NEW)
        folders = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir()}
        assert folders == {str(f) for n in visible for f in Path(n).parents if str(f) != "."}
        if not killed:
            break
    assert outcomes[0] == OLD
    assert outcomes[-1] == NEW


@pytest.mark.parametrize("undo_calls", [0, 2, 5, 8])
def test_killed_at_any_step_a_linked_folder_is_the_old_one_or_a_new_one(
    tmp_path, monkeypatch, undo_calls
):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "old").write_text("old")
    plan = ReplacementPlan(["d=1/l=1"], ["d=1/l=1/e=1/new"])
    outcomes = []
    for step in range(100):
        root = tmp_path / str(step)
        (root / "d=1").mkdir(parents=True)
        (root / "d=1" / "l=1").symlink_to("../../far")
        killed = True
        with monkeypatch.context() as patch:
            kill_after(step, patch)
            patch.setattr(file_replacement, "recover_interrupted", lambda directory: None)
            with contextlib.suppress(Killed), replace_files(root, "j", plan):
                (root / "d=1/l=1/e=1/new").touch()
                killed = False
        with monkeypatch.context() as patch:
            kill_after(undo_calls, patch)
            with contextlib.suppress(Killed):
                recover_interrupted(root)
        recover_interrupted(root)
        outcomes.append(list_data_files(root))
        assert outcomes[-1] in (["d=1/l=1/old"], ["d=1/l=1/e=1/new"])
        assert {path.name for path in root.iterdir()} - {"_SUCCESS"} == {"d=1"}
        assert (tmp_path / "far" / "old").read_text() == "old"
        if not killed and outcomes[-1] == ["d=1/l=1/e=1/new"]:
            break
    assert outcomes[0] == ["d=1/l=1/old"]
    assert outcomes[-1] == ["d=1/l=1/e=1/new"]


def test_an_error_in_the_block_takes_everything_back(tmp_path: Path) -> None:
    fill(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="bad"), replace_files(tmp_path, "j", PLAN):  # noqa: PT012
        (tmp_path / "part-0").write_text("half")
        raise ValueError("bad")
    assert content(tmp_path) == OLD
    assert sorted(tmp_path.rglob("*")) == before


def test_the_lock_is_free_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_directory(tmp_path):
            pass
