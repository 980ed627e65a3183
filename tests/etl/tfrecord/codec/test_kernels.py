"""Raw memory access stays inside its ranges, and trouble with the cache means compiling."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numba import njit

import etl
from etl.tfrecord.codec import kernels


@njit
def run_copy(target: int, source: int, length: int) -> None:
    kernels.copy_bytes(target, source, length)


@njit
def run_stream(target: int, source: int, length: int) -> None:
    kernels.stream_bytes(target, source, length)
    kernels.fence()


@njit
def run_same(left: int, right: int, length: int) -> bool:
    return kernels.same_bytes(left, right, length)


@pytest.mark.parametrize(
    "length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90, 128, 200]
)
@pytest.mark.parametrize("copy", [run_copy, run_stream])
def test_copy_touches_its_range_alone(copy: Callable[..., None], length: int) -> None:
    source = np.arange(1, 301, dtype=np.uint8)
    target = np.zeros(300, np.uint8)
    for first in (3, 3 + 61):
        target[:] = 0
        copy(target.ctypes.data + first, source.ctypes.data + 5, length)
        assert target[first : first + length].tolist() == source[5 : 5 + length].tolist()
        assert not target[:first].any()
        assert not target[first + length :].any()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17])
def test_same_bytes_sees_each_difference_and_nothing_beyond(length: int) -> None:
    left = np.arange(40, dtype=np.uint8)
    for changed in range(length + 1):
        right = left.copy()
        right[changed] ^= 1
        assert run_same(left.ctypes.data, right.ctypes.data, length) == (changed >= length)


PROGRAM = """
import gc
import numpy as np, pyarrow as pa
from numba.core.dispatcher import Dispatcher
from etl.tfrecord.codec.kernels import KernelCache
from etl.tfrecord.codec import warm_kernels

warm_kernels()
entries = [d for d in gc.get_objects() if isinstance(d, Dispatcher)
           and d.py_func.__module__.startswith("etl.")
           and isinstance(d._cache, KernelCache)]  # the others are called by kernels alone
assert len(entries) > 10
before = {d: len(d.signatures) for d in entries}
assert all(before.values()), [d.py_func.__name__ for d, n in before.items() if not n]

from etl.tfrecord.codec.decode import build_decoder
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.codec.infer import FeatureCollector
from etl.tfrecord.codec.framing import RecordBlock, index_records
from etl.tfrecord.codec.crc32c import crc32c
batch = pa.record_batch({
    "i": pa.array([1, None, 3], pa.int32()), "f": [0.5, 1.5, None], "s": ["a", None, "b" * 500],
    "l": [[1, 2], None, []], "q": pa.array([[[1.5]], None, []]), "t": [["x"], [], None],
})
for record_type, columns in (("Example", ["i", "f", "s", "l", "t"]), ("ByteArray", ["s"]),
                             ("SequenceExample", batch.schema.names)):
    part = batch.select(columns)
    if record_type == "ByteArray":
        part = part.slice(0, 1)
    encoder = build_encoder(part.schema, record_type)
    data = np.concatenate(list(encoder.encode_chunks(part, 2)))
    crc32c(data, 7)
    block = RecordBlock(data, index_records(data), 0, 0)
    collector = FeatureCollector(record_type)
    collector.update(block)
    decoder = build_decoder(collector.features(), record_type)
    decoder.decode_block(block)
    decoder.decode_sound(RecordBlock(data, np.array([[0, 3]]), 0, 0))
after = {d.py_func.__name__: (before[d], len(d.signatures)) for d in entries
         if len(d.signatures) != before[d]}
assert not after, after
"""


def test_nothing_is_left_to_compile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True,
        cwd=Path(etl.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


# What else says where the cache is, or whether there is one.
PLACES = ("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME", kernels.NO_CACHE)
NOBODY = 65534
JIT_CACHE_PROGRAM = "from etl.outer import run\nprint(run(40), sum(run.stats.cache_hits.values()))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the module, and a package of one small kernel."""
    folder = tmp_path / "project"
    (folder / "etl/tfrecord/codec").mkdir(parents=True, mode=0o755)
    shutil.copy(kernels.__file__, folder / "etl/tfrecord/codec")
    (folder / "etl/inner.py").write_text(
        "from etl.tfrecord.codec.kernels import inlined\n@inlined\ndef step(x):\n    return x + 1\n"
    )
    (folder / "etl/outer.py").write_text(
        "from etl.inner import step\nfrom etl.tfrecord.codec.kernels import kernel\n"
        "@kernel\ndef run(x):\n    return step(x)\n"
    )
    for package in ("etl", "etl/tfrecord", "etl/tfrecord/codec"):
        (folder / package / "__init__.py").touch()
    return folder


def start(project: Path, program: str = JIT_CACHE_PROGRAM, **environment: str) -> subprocess.Popen:
    inherited = {k: v for k, v in os.environ.items() if k not in PLACES}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd="/",
        env={**inherited, "PYTHONPATH": str(project), "HOME": "/nonexistent", **environment},
    )  # fmt: skip


def finish(process: subprocess.Popen) -> list[str]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output.split()


def run(project: Path, program: str = JIT_CACHE_PROGRAM, **environment: str) -> list[str]:
    return finish(start(project, program, **environment))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("outer.run-*.nbc"))


def change(project: Path) -> None:
    source = project / "etl/inner.py"
    source.write_text(source.read_text().replace("+ 1", "+ 2"))


def test_next_to_the_sources_used_again_and_replaced_when_inlined_code_changes(
    project: Path,
) -> None:
    assert run(project, SLUICE_NO_JIT_CACHE="1") == ["41", "0"]
    assert not entries(project)
    assert run(project) == ["41", "0"]
    (old,) = entries(project)
    assert old.parents[1] == project / "etl/tfrecord/codec/__pycache__"
    assert not stat.S_IMODE(old.stat().st_mode) & 0o022
    assert run(project) == ["41", "1"]
    change(project)
    assert run(project) == ["42", "0"]
    assert entries(project) != [old]
    assert len(entries(project)) == 1


@pytest.mark.parametrize("damage", [b"", b"cos\nsystem\n"])
@pytest.mark.parametrize("ending", [".nbc", ".nbi"])
@pytest.mark.exhaustive
def test_damaged_entries_mean_compiling(project: Path, damage: bytes, ending: str) -> None:
    run(project)
    (entry,) = project.rglob(f"outer.run-*{ending}")
    entry.write_bytes(damage)
    assert run(project) == ["41", "0"]
    assert run(project) == ["41", "1"]


@pytest.mark.exhaustive
def test_the_next_place_is_taken_where_one_cannot_be_used(project: Path, tmp_path) -> None:
    where = (
        "import etl.outer\nfrom etl.tfrecord.codec.kernels import find_cache\n"
        "print(etl.outer.run(40), find_cache())"
    )
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    places = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    # A file: no directory can be made there.
    (project / "etl/tfrecord/codec/__pycache__").touch()
    _, found = run(project, where, **places)
    assert Path(found).is_relative_to(tmp_path / "home/.cache/sluice")
    shutil.rmtree(tmp_path / "home/.cache")
    (tmp_path / "home/.cache").touch()
    _, found = run(project, where, **places)
    private = Path(found).parent
    assert private.parent == tmp_path / "tmp"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert entries(tmp_path / "tmp")
    shutil.rmtree(private)
    private.touch()
    assert run(project, where, **places) == ["41", "None"]


def test_a_directory_that_others_could_write_is_not_used(tmp_path: Path, monkeypatch) -> None:
    assert kernels._is_usable(tmp_path / "private" / "cache")
    for mode in (0o777, 0o1777, 0o770):
        place = tmp_path / f"place-{mode:o}"
        (place / "cache").mkdir(parents=True)
        place.chmod(mode)
        assert not kernels._is_usable(place / "cache")
        place.chmod(0o755)
        assert kernels._is_usable(place / "cache")
        (place / "cache").chmod(mode)
        assert not kernels._is_usable(place / "cache")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "private")
    assert not kernels._is_usable(link / "cache")
    # As another user finds what was installed: to be read alone, where it is filled.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not kernels._is_usable(tmp_path / "private" / "cache")
    (tmp_path / "private" / "cache" / "x.nbi").touch(mode=0o644)
    assert kernels._is_usable(tmp_path / "private" / "cache")


@pytest.mark.exhaustive
@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a file away")
def test_what_another_user_owns_is_not_loaded(project: Path, tmp_path: Path) -> None:
    run(project)
    (entry,) = entries(project)
    for number, path in enumerate((entry, entry.parent, entry.parents[1])):
        empty = tmp_path / f"home-{number}"
        empty.mkdir()
        os.chown(path, NOBODY, NOBODY)
        assert run(project, HOME=str(empty)) == ["41", "0"], path
        assert entries(empty), path
        os.chown(path, 0, 0)
    assert run(project) == ["41", "1"]


@pytest.mark.exhaustive
def test_entries_added_at_once_are_not_taken_for_each_other(project: Path) -> None:
    """Numba's index alone would name the code of two signatures alike."""
    program = "from etl.outer import run\nprint(run({}), run({}))"
    pair = [start(project, program.format(*values)) for values in (("1", "2.5"), ("2.5", "1"))]
    assert [finish(process) for process in pair] == [["2", "3.5"], ["3.5", "2"]]
    hits = "from etl.outer import run\nprint(run(1), run(2.5), sum(run.stats.cache_hits.values()))"
    assert run(project, hits) == ["2", "3.5", "2"]


def test_a_full_disk_means_going_on_without(project: Path) -> None:
    program = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from etl import outer\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "print(outer.run(40), outer.run._cache._enabled)"
    )
    assert run(project, program) == ["41", "False"]
    assert not entries(project)
    assert not list(project.rglob("*.tmp"))


@pytest.mark.exhaustive
def test_sources_in_a_zip_file_are_covered(project: Path, tmp_path: Path) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "code"), "zip", project))
    (home := tmp_path / "home").mkdir()
    assert run(archive, HOME=str(home)) == ["41", "0"]
    # Spark gives each application a folder of its own for the archives that it ships.
    (tmp_path / "application").mkdir()
    elsewhere = shutil.copy(archive, tmp_path / "application")
    assert run(Path(elsewhere), HOME=str(home)) == ["41", "1"]
    change(project)
    shutil.make_archive(str(tmp_path / "code"), "zip", project)
    assert run(archive, HOME=str(home)) == ["42", "0"]
