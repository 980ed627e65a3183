"""Fixtures that several parts of the ETL's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import mount_small_disk

DISK_BYTES = 4 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with mount_small_disk(tmp_path, DISK_BYTES) as disk:
        yield disk
