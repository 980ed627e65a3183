"""Checkpoints of a run: the newest, to resume from, and the best, to use."""

from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.restore import (
    manifest_sha256,
    read_dataset_reference,
    read_model_specs,
    read_run_manifest,
    restore_model,
)
from training.checkpoint.state import Saveable

__all__ = [
    "Checkpoints",
    "Saveable",
    "manifest_sha256",
    "read_dataset_reference",
    "read_model_specs",
    "read_run_manifest",
    "restore_model",
]
