"""All that the report reads. A part that is missing or damaged becomes a gap, not a failure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from conf.dataset import PassesOver
from conf.errors import InputDataError, SluiceError
from conf.manifest import Manifest
from conf.place import Place
from conf.run import (
    HISTORY_FILE,
    METRICS_FILE,
    RECOMMENDATIONS_FILE,
    RUN_CARD_FILE,
    STEPS_FILE,
    read_json,
)
from conf.training.input import InputConfig
from etl.tfrecord.places import read_manifest, resolve_version
from jobs.reporting.catalogue import ItemCatalogue, read_catalogue

SAMPLE_USERS = 12
_LONGEST_LINE_CHARS = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True)
class RankedList:
    """The items recommended to one user, best first, with their scores."""

    user: str
    items: tuple[str, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class RunData:
    """A run as it lies on disk.

    Attributes:
        run: Directory of the run.
        card: The run card.
        epochs: Entries of the training history, in order.
        steps: Lines of `metrics.jsonl`, in order.
        metrics: The evaluation.
        version: Directory of the dataset version that it was trained on.
        manifest: That version's manifest.
        catalogue: Counts, and titles where there are any, of that version's items.
        lists: First ranked lists.
        gaps: Why a part is not there, by part.
    """

    run: Path
    card: Mapping[str, Any]
    epochs: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, Any] | None = None
    version: Place | None = None
    manifest: Manifest | None = None
    catalogue: ItemCatalogue | None = None
    lists: tuple[RankedList, ...] = ()
    gaps: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved training config, empty where the card has none."""
        return as_mapping(self.card.get("config"))

    @property
    def model_name(self) -> str:
        """The model's name as people write it."""
        name = as_mapping(self.config.get("model")).get("name") or "the model"
        return str(name).replace("_", " ").upper() if name != "the model" else "The model"


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def read_run(run: Path) -> RunData:
    """Reads a run and the dataset version behind it.

    Args:
        run: Directory that holds `run_card.json`.

    Raises:
        InputDataError: The run card itself cannot be read.
    """
    card = read_json(run / RUN_CARD_FILE)
    gaps: dict[str, str] = {}
    epochs = _attempt("history", gaps, lambda: _read_history(run))
    steps = _attempt("steps", gaps, lambda: _read_steps(run / STEPS_FILE))
    metrics = _attempt("metrics", gaps, lambda: _read_optional(run / METRICS_FILE))
    if metrics is None:
        gaps.setdefault("metrics", "This run is not evaluated yet; sluice evaluate does that.")
    version = _attempt("dataset", gaps, lambda: resolve_version(_dataset_path(card)))
    manifest: Manifest | None = None
    catalogue: ItemCatalogue | None = None
    if version is not None:
        manifest = _attempt("dataset", gaps, lambda: read_manifest(version, _passes_over(card)))
    if version is not None and manifest is not None:
        catalogue = _attempt("catalogue", gaps, lambda: read_catalogue(version, manifest))
    lists = _attempt("lists", gaps, lambda: _read_lists(run / RECOMMENDATIONS_FILE))
    if lists is None:
        gaps.setdefault("lists", "No ranked lists have been written yet; sluice predict does that.")
    return RunData(
        run, card, epochs or (), metrics, version, manifest, catalogue, lists or (), gaps,
        steps or (),
    )  # fmt: skip


def _passes_over(card: Mapping[str, Any]) -> PassesOver:
    """Damage that the run itself trained on in spite of is no reason to show no dataset."""
    policy = as_mapping(as_mapping(card.get("config")).get("input")).get("on_corrupt", "fail")
    return InputConfig.model_construct(on_corrupt=policy).passes_over


def _attempt(part: str, gaps: dict[str, str], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except SluiceError as error:
        received = "" if error.received is None else f" ({error.received})"
        gaps[part] = f"{error.what[:1].upper()}{error.what[1:]}{received}."
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        gaps[part] = f"It cannot be read: {error!r}"
    return None


def _dataset_path(card: Mapping[str, Any]) -> str:
    """The exact version where the card names one, else whatever the config pointed at."""
    dataset = card.get("dataset")
    if isinstance(dataset, Mapping):
        for key in ("version_dir", "directory", "path"):
            if dataset.get(key):
                return str(dataset[key])
    configured = as_mapping(card.get("config")).get("dataset")
    if isinstance(configured, str):
        return configured
    raise InputDataError("The run card does not say which dataset it was trained on.")


def _read_history(run: Path) -> tuple[Mapping[str, Any], ...]:
    file = run / HISTORY_FILE
    if not file.exists():
        return ()
    data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise InputDataError(f"{file} must hold a list of epochs", received=type(data).__name__)
    return tuple(data)


def _read_steps(file: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines up to the first damaged one: a run that is going on may be writing its last."""
    lines: list[Mapping[str, Any]] = []
    if file.exists():
        with suppress(ValueError), file.open(encoding="utf-8") as handle:
            lines.extend(as_mapping(json.loads(line)) for line in handle)
    return tuple(lines)


def _read_optional(file: Path) -> Mapping[str, Any] | None:
    return read_json(file) if file.exists() else None


def _read_lists(file: Path) -> tuple[RankedList, ...] | None:
    if not file.exists():
        return None
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        lines = list(islice(iter(lambda: handle.readline(_LONGEST_LINE_CHARS), ""), SAMPLE_USERS))
    return tuple(_ranked_list(json.loads(line)) for line in lines)


def _ranked_list(data: Mapping[str, Any]) -> RankedList:
    items = tuple(str(item) for item in data["items"])
    return RankedList(str(data["user"]), items, tuple(float(s) for s in data.get("scores", ())))
