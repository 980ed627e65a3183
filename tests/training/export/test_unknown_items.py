"""Items that a catalogue does not have, scored inside a graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.manifest import Manifest
from training.encoders.operations import hash_text
from training.encoders.serving import ServingEncoders
from training.encoders.vocabularies import read_plan, read_vocabulary
from training.export.embeddings import ExportedItems
from training.export.signatures import Catalogue


def test_an_unknown_item_has_its_bucket(tiny_version: Path, tiny_manifest: Manifest) -> None:
    plan = read_plan(tiny_version, tiny_manifest)
    vocabulary = read_vocabulary(tiny_version, plan.vocabulary("movie_id"))
    buckets = replace(vocabulary, oov_buckets=3)
    spec = replace(plan.vocabulary("movie_id"), oov_buckets=3, size=buckets.size)
    plan = replace(
        plan, vocabularies=tuple(spec if v.name == spec.name else v for v in plan.vocabularies)
    )
    encoders = ServingEncoders(plan, ["movie_id"], {"movie_id": buckets})
    ids = np.arange(buckets.first_id, buckets.size)
    items = ExportedItems(ids, np.zeros((len(ids), 0), np.float32), "movie_id",
                          buckets.tokens, {"movie_id": ids})  # fmt: skip
    catalogue = Catalogue(encoders, items)
    keys = np.array([[buckets.tokens[1].as_py(), 999_999]])
    positions, found = catalogue.find(keys)
    assert positions.numpy().tolist() == [[1, len(ids)]]
    taken = catalogue.take(positions.numpy().ravel(), found)["movie_id"].numpy().tolist()
    assert taken == [buckets.first_id + 1, int(hash_text("999999", 3))]
