"""The cache of compiled code: where it is, whom it trusts, and that it never stands in the way."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from etl.tfrecord import jit_cache, kernels

ROOT = Path(kernels.__file__).parents[2]
# What else says where the cache is, or whether there is one.
PLACES = ("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME", jit_cache.SWITCH)
PROGRAM = "from outer import run\nprint(run(40), sum(run.stats.cache_hits.values()))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module of one small kernel."""
    folder = tmp_path / "project"
    folder.mkdir(mode=0o755)
    (folder / "inner.py").write_text(
        "from etl.tfrecord.kernels import inlined\n@inlined\ndef step(x):\n    return x + 1\n"
    )
    (folder / "outer.py").write_text(
        "from inner import step\nfrom etl.tfrecord.kernels import kernel\n"
        "@kernel\ndef run(x):\n    return step(x)\n"
    )
    return folder


def start(project: Path, program: str = PROGRAM, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(project), str(ROOT)])
    inherited = {k: v for k, v in os.environ.items() if k not in PLACES}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**inherited, "PYTHONPATH": paths, "HOME": "/nonexistent", **environment},
    )  # fmt: skip


def finish(process: subprocess.Popen) -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.split()


def run(project: Path, program: str = PROGRAM, **environment: str) -> list[str]:
    return finish(start(project, program, **environment))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("outer.run-*.sluice.nbc"))


def test_next_to_the_sources_and_used_again(project: Path) -> None:
    assert run(project) == ["41", "0"]
    (entry,) = entries(project)
    assert entry.parent == project / "__pycache__"
    assert not stat.S_IMODE(entry.stat().st_mode) & 0o022
    assert run(project) == ["41", "1"]


def test_a_cache_that_came_with_the_sources_is_read_though_it_cannot_be_written(
    tmp_path: Path,
) -> None:
    own, source = tmp_path / "own", tmp_path / "package" / "module.py"
    shipped = source.parent / "__pycache__"
    for folder in (own, shipped):
        folder.mkdir(mode=0o755, parents=True)
    assert jit_cache.find_shipped(source) is None
    jit_cache.CacheFiles(shipped, "run", "stamp").save("key", "code")
    assert jit_cache.find_shipped(source) == shipped
    files = jit_cache.CacheFiles(own, "run", "stamp", shipped)
    assert files.load("key") == "code"
    assert files.load("another CPU's") is None
    shipped.chmod(0o777)
    assert jit_cache.find_shipped(source) is None
    assert files.load("key") is None


def test_switched_off_reads_and_writes_nothing(project: Path) -> None:
    assert run(project, SLUICE_NO_JIT_CACHE="1") == ["41", "0"]
    assert not entries(project)
    run(project)
    assert run(project, SLUICE_NO_JIT_CACHE="1") == ["41", "0"]


def test_a_change_of_inlined_code_compiles_and_removes_the_old_entry(project: Path) -> None:
    run(project)
    (old,) = entries(project)
    (project / "inner.py").write_text((project / "inner.py").read_text().replace("+ 1", "+ 2"))
    assert run(project) == ["42", "0"]
    assert entries(project) != [old]
    assert len(entries(project)) == 1


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "pickle"])
def test_damaged_entries_mean_compiling(project: Path, damage: str) -> None:
    run(project)
    (entry,) = entries(project)
    content = bytearray(entry.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    pieces = {"truncate": content[:-7], "empty": b"", "flip": content, "pickle": b"cos\nsystem\n"}
    entry.write_bytes(pieces[damage])
    assert run(project) == ["41", "0"]
    assert run(project) == ["41", "1"]


def test_processes_may_fill_an_empty_cache_at_once(project: Path) -> None:
    started = [start(project) for _ in range(5)]
    assert [finish(process)[0] for process in started] == ["41"] * 5
    assert run(project) == ["41", "1"]
    assert not list(project.rglob("*.tmp"))


WHERE = (
    "from pathlib import Path\nimport outer\nfrom etl.tfrecord.jit_cache import find_directory\n"
    "print(outer.run(40), find_directory(Path(outer.__file__)))"
)


@pytest.fixture
def places(project: Path, tmp_path: Path) -> dict[str, str]:
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}


def test_the_next_place_is_taken_where_one_cannot_be_used(project: Path, places, tmp_path) -> None:
    (project / "__pycache__").touch()  # a file: no directory can be made there
    _, where = run(project, WHERE, **places)
    assert Path(where).is_relative_to(tmp_path / "home" / ".cache" / "sluice")
    assert entries(tmp_path / "home")
    shutil.rmtree(tmp_path / "home" / ".cache")
    (tmp_path / "home" / ".cache").touch()
    _, where = run(project, WHERE, **places)
    assert Path(where).parent == tmp_path / "tmp"
    assert stat.S_IMODE(Path(where).stat().st_mode) == 0o700
    assert entries(tmp_path / "tmp")
    shutil.rmtree(where)
    Path(where).touch()
    assert run(project, WHERE, **places) == ["41", "None"]


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is read-only to root")
def test_read_only_sources_and_home(project: Path, places, tmp_path: Path) -> None:
    for folder in (project, tmp_path / "home"):
        folder.chmod(0o555)
    _, where = run(project, WHERE, **places)
    assert Path(where).parent == tmp_path / "tmp"


def test_a_temporary_directory_that_others_could_write_is_not_used(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o770):
        folder = tmp_path / f"cache-{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        assert not jit_cache._is_usable(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not jit_cache._is_usable(link)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a file away")
def test_what_another_user_owns_is_not_loaded(project: Path) -> None:
    run(project)
    (entry,) = entries(project)
    os.chown(entry, 65534, 65534)
    assert run(project) == ["41", "0"]
    (entry,) = entries(project)
    os.chown(entry, 0, 0)
    entry.chmod(0o666)
    assert run(project) == ["41", "0"]
    os.chown(project / "__pycache__", 65534, 65534)
    assert not jit_cache._is_usable(project / "__pycache__")


def test_a_full_disk_means_going_on_without(project: Path) -> None:
    program = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import outer\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "print(outer.run(40), outer.run._cache._enabled)"
    )
    assert run(project, program) == ["41", "False"]
    assert not entries(project)
    assert not list(project.rglob("*.tmp"))


def test_digest_follows_compiled_sources_of_the_whole_package(tmp_path: Path) -> None:
    def digest() -> str:
        jit_cache.digest_kernels.cache_clear()
        return jit_cache.digest_kernels(tmp_path / "top" / "a")

    for folder in ("a", "b"):
        (tmp_path / "top" / folder).mkdir(parents=True)
        (tmp_path / "top" / folder / "__init__.py").touch()
    (tmp_path / "top" / "__init__.py").touch()
    (tmp_path / "top" / "b" / "inner.py").write_text("from etl.tfrecord.kernels import inlined\n")
    before = digest()
    (tmp_path / "top" / "b" / "plain.py").write_text("x = 2\n")
    (tmp_path / "beside.py").write_text("from etl.tfrecord.kernels import inlined\n")
    assert digest() == before
    (tmp_path / "top" / "b" / "inner.py").write_text("import etl.tfrecord.kernels  # changed\n")
    assert digest() != before


def test_sources_in_a_zip_file_are_covered(project: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "code"), "zip", project)
    home = tmp_path / "home"
    home.mkdir()
    assert run(Path(archive), HOME=str(home)) == ["41", "0"]
    assert run(Path(archive), HOME=str(home)) == ["41", "1"]
    (project / "inner.py").write_text((project / "inner.py").read_text().replace("+ 1", "+ 2"))
    shutil.make_archive(str(tmp_path / "code"), "zip", project)
    assert run(Path(archive), HOME=str(home)) == ["42", "0"]
