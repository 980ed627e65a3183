"""Embedding tables, static and dynamic, and the optimizers that touch only a batch's rows.

The public API, imported when it is first asked for:

    TableStore    rows by key for trainers of one's own: pull, push, delete, save, load
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.embedding.table_store import TableStore

__all__ = ["TableStore"]


def __getattr__(name: str) -> Any:
    """Imports a name of the public API."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training.embedding.table_store import TableStore

    return TableStore
