"""An exported version in memory: its signatures, and the items that it ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from conf.artefacts.export import read_card
from conf.errors import ConfigError
from training.evaluation.item_index import ItemIndex
from training.index.item_columns import find_items_file, read_items
from training.loading.loaded_model import LoadedModel

Arrays = dict[str, np.ndarray]


class Exported(Protocol):
    """What a `Ranker` calls: an `Export`, a version of the server, an endpoint."""

    @property
    def card(self) -> Mapping[str, Any]:
        """What `export.json` says."""

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature by name."""


@dataclass(frozen=True)
class Items(ItemIndex):
    """What is ranked, ids ascending; `vectors` are `[items, 0]` where a model scores pairs."""

    keys: pa.Array  # raw, `[items]`
    features: Arrays | None = None  # encoded ones of items that the export need not know

    @cached_property
    def tensor(self) -> np.ndarray:
        """The keys as signatures take them: int64, or text."""
        return np.asarray(self.keys.to_numpy(zero_copy_only=False))


NO_ITEMS = Items(np.zeros(0, np.int64), np.zeros((0, 0), np.float32), pa.array([]))


class Export:
    """A version of an exported model; its graph is loaded when it is first called.

    None `threads` of a call are TensorFlow's choice.
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path, self._threads = path, threads
        self.card: Mapping[str, Any] = read_card(path)
        self._items_file = find_items_file(self.card)

    @property
    def is_ranking(self) -> bool:
        """Whether it scores pairs, rather than comparing vectors."""
        return "outputs" in self.card

    @property
    def has_items(self) -> bool:
        """Whether it knows items to rank."""
        return self._items_file is not None

    @property
    def batch_size(self) -> int:
        """Rows of a call."""
        return int(self.card["lists"]["batch_size"])

    @cached_property
    def _model(self) -> LoadedModel:
        return LoadedModel(self.path, threads=self._threads)

    def call(self, signature: str, inputs: Arrays) -> Arrays:
        """Returns the outputs of a signature by name; inputs that it does not take are ignored."""
        return self._model.call(signature, inputs)

    def find_inputs(self, signature: str) -> tuple[Mapping[str, Any], ...]:
        """Returns what `export.json` says of the inputs of a signature that are features."""
        return find_inputs(self.card, signature)

    @cached_property
    def items(self) -> Items:
        """The catalogue."""
        if self._items_file is None:
            raise ConfigError(
                "the model ranks no items",
                received=self.card.get("no_item_scores", "its dataset has no item"),
                fix="score rows by --input, or train without what stands in the way",
            )
        found = read_items(self.path / self._items_file)
        return Items(found.ids, found.vectors, found.keys)


def find_inputs(card: Mapping[str, Any], signature: str) -> tuple[Mapping[str, Any], ...]:
    """Returns what `export.json` says of the inputs of a signature that are features."""
    signatures, reason = card["signatures"], card.get("no_item_scores")
    if signature not in signatures:
        raise ConfigError(
            "the exported model cannot give that",
            received=f"signature {signature}" + (f": {reason}" if reason else ""),
            allowed=", ".join(signatures),
        )
    return tuple(item for item in signatures[signature]["inputs"] if "feature" in item)
