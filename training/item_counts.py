"""How often each item occurs in the train split: for the logQ correction and for popularity."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from conf.encoders import ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import OOV_ID

ENCODERS_DIR = "encoders"


def read_item_counts(version_dir: Path, manifest: Manifest) -> np.ndarray:
    """Reads the train counts of the item vocabulary.

    Args:
        version_dir: Directory that holds the manifest.
        manifest: The version's manifest.

    Returns:
        int64 `[vocabulary_size]`, indexed by item id; 0 for padding. Id 1 (OOV) holds the train
        rows whose item is not in the vocabulary.

    Raises:
        InputDataError: The item feature has no vocabulary, or its file does not fit.
    """
    spec = manifest.schema[manifest.keys.item]
    directory = version_dir / ENCODERS_DIR
    try:
        plan = EncoderPlan.from_json(json.loads((directory / ENCODERS_FILE).read_text("utf-8")))
        table = pq.read_table(directory / plan.vocabulary(spec.encoding).file)
        ids, found = table["id"].to_numpy(), table["count"].to_numpy()
    except (OSError, KeyError, ValueError) as error:
        raise InputDataError(
            f"cannot read the vocabulary of the item feature {spec.name!r}",
            received=repr(error),
            allowed=f"{directory / ENCODERS_FILE} and the Parquet files that it lists",
            fix="restore the files, or build the dataset again",
        ) from error
    size = spec.vocabulary_size
    if size is None or (len(ids) and not 0 <= ids.min() <= ids.max() < size):
        raise InputDataError(
            f"the vocabulary of {spec.name!r} does not fit the schema",
            received=f"ids up to {ids.max() if len(ids) else None}",
            allowed=f"ids below vocabulary_size = {size}",
            fix="build the dataset again",
        )
    counts = np.zeros(size, np.int64)
    counts[ids] = found
    if not counts[OOV_ID]:
        counts[OOV_ID] = max(0, manifest.split("train").rows - int(counts.sum()))
    return counts
