"""What `sluice predict` writes of a model in memory: it is exported once, and applied."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from conf.artefacts.export import ExportOptions, Give
from training.apply.answers import Asked, Source
from training.apply.export import Export
from training.apply.predict import Predicted, predict_rows
from training.checkpoint.restore import TrainedModel
from training.export.saved_model import write_export
from training.raw_inputs.files import RawFile
from training.reader.training_data import TrainingData

_EXPORTS: dict[int, tuple[Any, ...]] = {}


def open_export(trained: TrainedModel) -> Export:
    """Returns the export of a model; the same one for the same object."""
    if id(trained) not in _EXPORTS:
        folder = tempfile.TemporaryDirectory()
        export = Export(write_export(trained, ExportOptions(Path(folder.name))))
        _EXPORTS[id(trained)] = (trained, folder, export)
    export = _EXPORTS[id(trained)][-1]
    assert isinstance(export, Export)
    return export


def predict(
    trained: TrainedModel, target: Path, source: Source | None = None, **asked: Any
) -> Predicted:
    """Writes what rows get; `asked` as of `Asked`."""
    data = TrainingData(trained.version_dir, trained.manifest)
    return predict_rows(open_export(trained), source or Source(), Asked(**asked), target, data)


def write_lists(
    trained: TrainedModel,
    target: Path,
    k: int,
    source: Source | None = None,
    **asked: Any,
) -> Predicted:
    """Writes lists."""
    return predict(trained, target, source, give=Give.LISTS, k=k, **asked)


def write_scores(
    trained: TrainedModel, target: Path, split: str, file: RawFile | None = None
) -> int:
    """Writes the scores of a split, or of a file; returns their number."""
    source = Source(split=split) if file is None else Source(file=file)
    return predict(trained, target, source, give=Give.SCORES).rows
