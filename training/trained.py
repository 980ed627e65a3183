"""A trained model together with what it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from conf.manifest import Manifest
from conf.place import Place
from conf.training import TrainConfig

if TYPE_CHECKING:
    from training.models.base import RetrievalModel


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on.

    Attributes:
        model: The model.
        config: Config of its run.
        manifest: Manifest of its dataset version.
        version_dir: Directory of that version.
    """

    model: RetrievalModel
    config: TrainConfig
    manifest: Manifest
    version_dir: Place


def restore_trained(run_dir: Path, which: Literal["best", "last"] = "best") -> TrainedModel:
    """Restores a run's model from its best or last checkpoint.

    Raises:
        UpstreamNotReadyError: The run has no such checkpoint, or its dataset is gone.
        InputDataError: The checkpoint or the dataset version is damaged.
    """
    from training.checkpoint import restore_model

    model, config, manifest, version_dir = restore_model(run_dir, which)
    return TrainedModel(model, config, manifest, version_dir)
