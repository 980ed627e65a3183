"""Whether the ids of mixed datasets stand for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.place import Place
from training.row_matching import match_keys, read_encoded_version


def check_mixed_ids(
    version_dir: Place,
    manifest: Manifest,
    mixed: Sequence[tuple[Place, Manifest]],
    features: Sequence[str],
) -> None:
    """Refuses datasets whose ids stand for other tokens: they would train the wrong rows.

    Vocabularies of one length need not hold the same tokens in the same order.

    Args:
        version_dir: Directory of the dataset that others are mixed into.
        manifest: Its manifest.
        mixed: Directory and manifest of the others, whose features have the same specs.
        features: Names of the features that are read.

    Raises:
        InputDataError: A feature's ids do not agree, or the encoders of a version are damaged.
    """
    names = [name for name in features if manifest.schema[name].vocabulary_size is not None]
    mixed = [
        part for part in mixed if part[1].encoders_fingerprint != manifest.encoders_fingerprint
    ]
    if not names or not mixed:
        return
    own = read_encoded_version(version_dir, manifest)
    for other_dir, other_manifest in mixed:
        other = read_encoded_version(other_dir, other_manifest)
        encoded = {column.feature for plan in (own.plan, other.plan) for column in plan.columns}
        for name in names:
            if name not in encoded:
                continue  # Ids as they came: nothing tells what they stand for.
            keys = np.arange(1, manifest.schema[name].vocabulary_size)
            found = match_keys(name, keys, own, other)
            if found is None or not np.array_equal(found, keys):
                raise InputDataError(
                    f"ids of feature {name!r} stand for other tokens in a dataset of input.mix",
                    received=f"encoders of dataset {other_manifest.dataset_name!r}",
                    allowed=f"those of dataset {manifest.dataset_name!r}",
                    fix="leave it out of the mix, or encode the feature by hashing in both builds",
                )
