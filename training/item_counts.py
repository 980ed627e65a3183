"""How often each item occurs in the train split: for the logQ correction and for popularity."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import OOV_ID
from training.vocabularies import read_plan, read_token_counts


def read_item_counts(version_dir: Path, manifest: Manifest) -> np.ndarray:
    """Reads the train counts of the item vocabulary.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.

    Returns:
        int64 `[vocabulary_size]`, indexed by item id; 0 for padding. Id 1 (OOV) holds the train
        rows whose item is not in the vocabulary; drawn negatives count as none of these.

    Raises:
        InputDataError: The item feature has no vocabulary, or its file is missing or damaged.
    """
    spec = manifest.schema[manifest.require_key("item")]
    plan = read_plan(version_dir, manifest)
    try:
        vocabulary = plan.vocabulary(spec.encoding)
    except KeyError as error:
        raise InputDataError(
            f"the item feature {spec.name!r} has no vocabulary, so its items are not counted",
            received=f"encoding {spec.encoding!r}",
            allowed="a vocabulary of the encoder plan",
            fix="encode the item with a vocabulary and build the dataset again",
        ) from error
    if spec.vocabulary_size != vocabulary.size:
        raise InputDataError(
            f"the vocabulary of {spec.name!r} does not fit the schema",
            received=f"{vocabulary.size} ids",
            allowed=f"vocabulary_size = {spec.vocabulary_size}",
            fix="build the dataset again",
        )
    counts = read_token_counts(version_dir, vocabulary)
    events = manifest.split("train").rows - manifest.counts.drawn.get("train", 0)
    counts[OOV_ID] = max(0, events - int(counts.sum()))
    return counts
