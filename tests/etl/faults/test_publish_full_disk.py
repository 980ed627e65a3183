"""A disk that fills up while a version is published: the earlier one stays, and is read whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from conf.dataset import DatasetPaths, read_manifest, resolve_version
from jobs.cli import run_app
from tests.etl.versions.versions import publish

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_disk_fills_up_at_every_moment_of_a_publication(small_disk, capsys):
    paths = DatasetPaths(small_disk, "d")
    first = publish(paths, "v1")
    before = listing(paths.base)
    app = typer.Typer(add_completion=False)
    app.command()(lambda: publish(paths, "v2") and None)
    filler = small_disk / "filler"
    messages, pages = [], 0
    while True:
        free = os.statvfs(small_disk)
        filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_frsize - pages * PAGE_BYTES))
        code = run_app(app, [])
        filler.unlink()
        if code == 0:
            break
        assert code == 1
        messages.append(capsys.readouterr().err)
        # Nothing is left of it, no claim that would hold up the next publisher either.
        assert listing(paths.base) == before
        assert resolve_version(paths.base) == first
        assert os.listdir(paths.versions) == ["v1"]
        read_manifest(first)
        pages += 1
    assert len(messages) >= 3
    for message in messages:
        assert "No space left on device" in message
        assert "what was published before is untouched" in message
    assert resolve_version(paths.base).name == "v2"


@pytest.mark.parametrize("step", ["sync", "pointer"])
def test_a_version_whose_pointer_cannot_be_written_is_not_published(tmp_path, monkeypatch, step):
    import etl.publish

    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    name = {"sync": "sync_directory", "pointer": "write_text_atomic"}[step]
    whole = getattr(etl.publish, name)

    def fail(path: Path, *arguments: str) -> None:
        if path in (paths.versions, paths.current):
            raise OSError(28, "No space left on device")
        whole(path, *arguments)

    monkeypatch.setattr(etl.publish, name, fail)
    with pytest.raises(OSError, match="No space"):
        publish(paths, "v2")
    assert os.listdir(paths.versions) == ["v1"]
    assert resolve_version(paths.base).name == "v1"
