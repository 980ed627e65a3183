"""The items of a dataset version: how often each was met in training, and what it is called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.manifest import Manifest
from conf.place import Place
from etl.encoders.vocabulary import load_vocabulary
from etl.tfrecord.decode import WireFeature, read_batches
from etl.tfrecord.locations import FileOpener

CATALOG_SPLIT = "catalog"


@dataclass(frozen=True)
class ItemCatalogue:
    """Items in order of falling train count.

    Attributes:
        counts: Occurrences in the train split by rank, int64 `[items]`, falling.
        tokens: Raw tokens in the same order.
        titles: Title by raw token, for the items that have one.
    """

    counts: np.ndarray
    tokens: pa.Array
    titles: Mapping[str, str] = field(default_factory=dict)

    def name(self, token: str) -> str:
        """Returns an item's title, or its token where it has none."""
        return self.titles.get(token, token)

    def share_of_top(self, fraction: float) -> float:
        """Returns the share of all occurrences that the most frequent items hold.

        Args:
            fraction: Share of the catalogue, in (0, 1]; at least one item is taken.
        """
        total = int(self.counts.sum())
        head = max(1, round(len(self.counts) * fraction))
        return float(self.counts[:head].sum() / total) if total else 0.0


def read_catalogue(version: Place, manifest: Manifest) -> ItemCatalogue | None:
    """Reads the item vocabulary of a version, and the titles where its catalogue has any.

    Returns:
        The catalogue, or None where there is no item, or none encoded by a vocabulary.

    Raises:
        InputDataError: The encoders are damaged.
    """
    if manifest.keys.item is None:
        return None
    directory = version / ENCODERS_DIR
    plan = EncoderPlan.from_json(json.loads((directory / ENCODERS_FILE).read_text("utf-8")))
    encoding = manifest.schema[manifest.keys.item].encoding
    try:
        spec = plan.vocabulary(encoding)
    except KeyError:
        return None
    table = load_vocabulary(directory, spec).sort_by([("count", "descending"), ("id", "ascending")])
    return ItemCatalogue(
        counts=table["count"].to_numpy().astype(np.int64),
        tokens=table["token"].combine_chunks(),
        titles=_read_titles(version, manifest, table),
    )


def _read_titles(version: Place, manifest: Manifest, vocabulary: pa.Table) -> dict[str, str]:
    feature = _title_feature(manifest)
    if feature is None or not manifest.has_split(CATALOG_SPLIT):
        return {}
    tokens = dict(zip(vocabulary["id"].to_pylist(), vocabulary["token"].to_pylist(), strict=True))
    wanted = [WireFeature(manifest.require_key("item"), "int64"), WireFeature(feature, "bytes")]
    titles: dict[str, str] = {}
    for shard in manifest.split(CATALOG_SPLIT).shards:
        path, opener, slots = str(version / shard.path), FileOpener(), manifest.slots
        for batch in read_batches(path, wanted, opener=opener, slots=slots):
            for item, title in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if item in tokens and title is not None:
                    titles[str(tokens[item])] = title.decode("utf-8", "replace")
    return titles


def _title_feature(manifest: Manifest) -> str | None:
    """A plain text of the item whose name says that it is a title."""
    for spec in manifest.schema.by_role("item", "id"):
        is_text = spec.dtype == "bytes" and not spec.is_list and spec.encoding == "identity"
        if is_text and any(word in spec.name.lower() for word in ("title", "name")):
            return spec.name
    return None
