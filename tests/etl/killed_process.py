"""The end of a process, at any change of a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


CHANGES = ("replace", "rename", "unlink", "touch", "mkdir", "rmdir")


def kill_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets that many changes of directories happen, and no more until the patch is undone."""
    left = [calls]

    def counted(original):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for name in CHANGES:
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
