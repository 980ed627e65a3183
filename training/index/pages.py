"""Files whose pages the processes of a server share: weights and vectors of each version."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from conf.storage.atomic_output import atomic_file
from conf.storage.locks import hold_file_lock
from training.index.vector_index import build_exact

VECTORS_FILE = "vectors.faiss"


def name_pages(pages: Path, version: Path, card: Mapping[str, Any]) -> Path:
    """Names the directory of a version's files; another export of its number has another one."""
    return pages / version.parent.name / f"{version.name}-{card['fingerprint'][:16]}"


def drop_pages(pages: Path, model: str, kept: Collection[int]) -> None:
    """Removes the files of versions that are not kept; who has mapped them goes on reading them.

    Args:
        pages: Directory of all models.
        model: The model.
        kept: Its versions that stay.
    """
    for directory in (pages / model).glob("*-*"):
        if int(directory.name.partition("-")[0]) not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def share_vectors(vectors: NDArray[np.float32], pages: Path) -> Any:
    """Returns an exact index whose vectors all processes read from the same pages.

    Args:
        vectors: `[items, dim]`.
        pages: Directory of the version's files; the first process writes the vectors.
    """
    pages.mkdir(parents=True, exist_ok=True)
    file = pages / VECTORS_FILE
    with hold_file_lock(pages / ".lock"):
        if not file.exists():
            with atomic_file(file, durable=False) as unfinished:
                faiss.write_index(build_exact(vectors), str(unfinished))
    return faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
