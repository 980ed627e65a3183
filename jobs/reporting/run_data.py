"""Reads what a report shows: a run, its dataset version and the item catalogue.

A part that is missing or damaged becomes a gap, not a failure.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError, SluiceError
from conf.manifest import Manifest
from conf.paths import ReadablePath, ToleratesShard, read_manifest, resolve_version
from conf.run import (
    HISTORY_FILE,
    METRICS_FILE,
    RECOMMENDATIONS_FILE,
    RUN_CARD_FILE,
    STEPS_FILE,
    read_json,
)
from conf.training.input import InputConfig
from etl.encoders.vocabulary import load_vocabulary
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.files.locations import FileOpener, find_path
from etl.tfrecord.types.features import WireFeature
from jobs.reporting.formatting import as_mapping

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


def read_catalogue(version: ReadablePath, manifest: Manifest) -> ItemCatalogue | None:
    """Reads the item vocabulary of a version, and the titles where its catalogue has any.

    Returns:
        The catalogue, or None where the items are not encoded by a vocabulary.

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


def _read_titles(version: ReadablePath, manifest: Manifest, vocabulary: pa.Table) -> dict[str, str]:
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


SAMPLE_USERS = 12
_LONGEST_LINE_CHARS = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True)
class RankedList:
    """The items recommended to one user, best first, with their scores."""

    user: str
    items: tuple[str, ...]
    scores: tuple[float, ...]


class MissingPartError(Exception):
    """A section has nothing to show; the text says why."""


@dataclass(frozen=True)
class RunData:
    """A run as it is on disk.

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
    version: ReadablePath | None = None
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

    def require_manifest(self) -> Manifest:
        """Returns the dataset version's manifest.

        Raises:
            MissingPartError: There is none.
        """
        if self.manifest is None:
            raise MissingPartError(self.gaps["dataset"])
        return self.manifest


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
    version = _attempt("dataset", gaps, lambda: resolve_version(find_path(_dataset_path(card))))
    manifest: Manifest | None = None
    catalogue: ItemCatalogue | None = None
    if version is not None:
        manifest = _attempt("dataset", gaps, lambda: read_manifest(version, _shard_policy(card)))
    if version is not None and manifest is not None:
        catalogue = _attempt("catalogue", gaps, lambda: read_catalogue(version, manifest))
    lists = _attempt("lists", gaps, lambda: _read_lists(run / RECOMMENDATIONS_FILE))
    if lists is None:
        gaps.setdefault("lists", "No ranked lists have been written yet; sluice predict does that.")
    return RunData(
        run, card, epochs or (), metrics, version, manifest, catalogue, lists or (), gaps,
        steps or (),
    )  # fmt: skip


def _shard_policy(card: Mapping[str, Any]) -> ToleratesShard:
    """Shards that the run itself was allowed to skip do not hide the dataset."""
    policy = as_mapping(as_mapping(card.get("config")).get("input")).get("on_corrupt", "fail")
    return InputConfig.model_construct(on_corrupt=policy).tolerates


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
    """The version that the card names, else the dataset of the config."""
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
