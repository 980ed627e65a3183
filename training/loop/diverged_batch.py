"""Diverged training: the batch whose loss is not finite, and what is odd about it.

<run>/diverged/batch.npz         the features of the batch, for `numpy.load`
               diverged.json     the step, and each feature's range
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.artefacts.run import DIVERGED_DIR
from conf.manifest import Manifest
from conf.storage.atomic_output import sync_directory, write_text_atomic
from training.checkpoint.resume_state import Position

BATCH_FILE = "batch.npz"
SUMMARY_FILE = "diverged.json"
# Beyond so many standard deviations, or so large where none are known, a number is extreme.
EXTREME_DEVIATIONS = 20.0
EXTREME_VALUE = 1e6


@dataclass(frozen=True)
class DivergedStep:
    """The step after which something was not finite first.

    Attributes:
        position: Its batch.
        step: One-based step, over all epochs.
        loss: NaN or an infinity; NaN too where a gradient or the state was not finite.
    """

    position: Position
    step: int
    loss: float


def write_diverged_batch(
    run: Path, divergence: DivergedStep, batch: Mapping[str, Any], manifest: Manifest
) -> Path:
    """Writes the offending batch and its description; returns their directory.

    Args:
        run: Directory of the run.
        divergence: Where it happened.
        batch: The batch's features: tensors, ragged or sparse ones among them.
        manifest: Of the dataset version, for what training saw.

    Raises:
        OSError: The disk is full, or there is no permission.
    """
    directory = run / DIVERGED_DIR
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    _write_arrays(directory / BATCH_FILE, flatten_batch(batch))
    statistics = manifest.statistics.get("train", {})
    features = {
        name: describe_feature(_values(value), statistics.get(name, {}))
        for name, value in batch.items()
    }
    summary = {
        "epoch": divergence.position.epoch + 1,
        "batch": divergence.position.batch,
        "step": divergence.step,
        "loss": str(divergence.loss),
        "non_finite": [name for name, found in features.items() if found["non_finite"]],
        "extreme": [name for name, found in features.items() if found["extreme"]],
        "features": features,
    }
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    write_text_atomic(directory / SUMMARY_FILE, text)
    sync_directory(run)
    return directory


def flatten_batch(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns a batch as plain arrays, readable by `numpy.load` without pickle.

    A ragged feature becomes `<name>.values` and `<name>.row_splits`, a sparse one
    `<name>.indices`, `<name>.values` and `<name>.dense_shape`; bytes become `<name>.bytes`
    (uint8, end to end) and `<name>.offsets`.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        if isinstance(value, tf.RaggedTensor):
            arrays |= _flatten_dense(f"{name}.values", value.flat_values)
            arrays[f"{name}.row_splits"] = value.row_splits.numpy()
        elif isinstance(value, tf.SparseTensor):
            arrays |= _flatten_dense(f"{name}.values", value.values)
            arrays[f"{name}.indices"] = value.indices.numpy()
            arrays[f"{name}.dense_shape"] = value.dense_shape.numpy()
        else:
            arrays |= _flatten_dense(name, value)
    return arrays


def describe_feature(values: np.ndarray, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a feature's range, and what of it is not finite or far from what training saw.

    Args:
        values: All values, any shape.
        statistics: The manifest's statistics of the feature in the train split; may be empty.
    """
    described: dict[str, Any] = {
        "min": None,
        "max": None,
        "non_finite": 0,
        "extreme": 0,
        "first_rows": [],
    }
    if values.dtype.kind not in "fiu" or not values.size:
        return described
    finite = np.isfinite(values)
    odd = ~finite
    described["non_finite"] = int(odd.sum())
    if values.dtype.kind == "f":
        extreme = finite & (np.abs(values - statistics.get("mean", 0.0)) > _limit(statistics))
        described["extreme"] = int(extreme.sum())
        odd = odd | extreme
    if finite.any():
        described["min"] = values[finite].min().item()
        described["max"] = values[finite].max().item()
    described["first_rows"] = np.unique(np.nonzero(odd)[0])[:10].tolist()
    return described


def _write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """As `numpy.savez_compressed`, which takes no feature named `file`, and refusing objects."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _limit(statistics: Mapping[str, Any]) -> float:
    deviation = statistics.get("std")
    return EXTREME_DEVIATIONS * deviation if deviation else EXTREME_VALUE


def _values(value: Any) -> np.ndarray:
    if isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    elif isinstance(value, tf.SparseTensor):
        value = value.values
    return np.asarray(value)


def _flatten_dense(name: str, value: Any) -> dict[str, np.ndarray]:
    array = np.asarray(value)
    if array.dtype != object:
        return {name: array}
    items = [bytes(item) for item in array.ravel()]
    offsets = np.cumsum([0, *map(len, items)])
    return {
        f"{name}.bytes": np.frombuffer(b"".join(items), np.uint8),
        f"{name}.offsets": offsets.reshape(-1),
    }
