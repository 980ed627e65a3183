"""Public data sets that tests look for below `SLUICE_DATA`; docs/testing.md has the same list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "SLUICE_DATA"
DATA_SETS = {
    "a9a": ("a9a_123d_train.libsvm",),
    "criteo-10k": ("train_examples.txt",),
    "diginetica-coder": ("train.tsv", "test.tsv", "item_category.tsv"),
    "frappe/nfm": (
        "frappe.train*.libfm",
        "frappe.validation.libfm",
        "frappe.test.libfm",
    ),
    "ipinyou-deepctr": ("train.fm.txt", "test.fm.txt"),
    "ml-100k": ("u1.base", "u1.test"),
    "ml-1m": ("users.dat", "movies.dat", "ratings.dat"),
    "ml-1m-ncf": ("ml-1m.train.rating", "ml-1m.test.negative"),
    "ml-1m-sasrec": ("ml-1m.txt",),
}
"""The files of each folder, by patterns; a folder that lacks one is no such data set."""


def find_data(name: str) -> Path | None:
    """The folder of a data set, or None where this machine has it not.

    Args:
        name: Of `DATA_SETS`.
    """
    root, files = os.environ.get(VARIABLE), DATA_SETS[name]
    folder = Path(root, name) if root else None
    has_all = folder is not None and all(any(folder.glob(file)) for file in files)
    return folder if has_all else None


def require_data(name: str) -> Path:
    """The folder of a data set; skips the test where this machine has it not."""
    folder = find_data(name)
    if folder is None:
        pytest.skip(f"{VARIABLE} names no folder that has {name}/{{{','.join(DATA_SETS[name])}}}")
    return folder
