"""Reads what a report shows: a run, its dataset version and the item catalogue.

A part that is missing or damaged becomes a gap, not a failure.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from conf.artefacts.dataset import ToleratesShard, read_manifest, resolve_version
from conf.artefacts.run import (
    HISTORY_FILE,
    METRICS_FILE,
    RECOMMENDATIONS_FILE,
    RUN_CARD_FILE,
    STEPS_FILE,
    VALIDATIONS_FILE,
    read_json,
)
from conf.encoders import ENCODERS_DIR, ENCODERS_FILE, EncoderPlan
from conf.errors import InputDataError, SluiceError
from conf.manifest import Manifest
from conf.metrics import OWN_PREFIX, register_metric
from conf.paths import ReadablePath
from conf.splits import CATALOG
from conf.storage.locations import FileOpener, find_path
from conf.training.input import InputConfig
from etl.encoders.vocabulary import load_vocabulary
from etl.records.train_counts import read_counts
from etl.tfrecord.codec.decode import read_batches
from etl.tfrecord.types.features import WireFeature
from jobs.support.formatting import as_mapping, first_of_several, metric_title

SAMPLE_USERS = 12
_LONGEST_LINE_CHARS = 1_000_000
_NOT_YET = (
    ("metrics", METRICS_FILE, "This run is not evaluated yet; sluice evaluate does that."),
    ("lists", RECOMMENDATIONS_FILE,
     "No ranked lists have been written yet; sluice predict does that."),
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class ItemCatalogue:
    """Items in order of falling popularity.

    Attributes:
        counts: Events of the train rows by rank, int64 `[items]`, falling; None where the
            version was built without train counts.
        tokens: Raw tokens in the same order; in that of ids where nothing was counted.
        titles: Title by raw token, for the items that have one.
    """

    counts: np.ndarray | None
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
        counts = np.zeros(0, np.int64) if self.counts is None else self.counts
        total = int(counts.sum())
        head = max(1, round(len(counts) * fraction))
        return float(counts[:head].sum() / total) if total else 0.0


def read_catalogue(version: ReadablePath, manifest: Manifest) -> ItemCatalogue | None:
    """Reads the items of a version: their vocabulary, train counts and titles, if there are any.

    Returns:
        The catalogue, or None where the items are not encoded by a vocabulary.

    Raises:
        InputDataError: The encoders or the train counts are damaged.
    """
    if manifest.keys.item is None:
        return None
    directory = version / ENCODERS_DIR
    plan = EncoderPlan.from_json(json.loads((directory / ENCODERS_FILE).read_text("utf-8")))
    try:
        spec = plan.vocabulary(manifest.schema[manifest.keys.item].encoding)
    except KeyError:
        return None
    table = load_vocabulary(directory, spec)
    counts = _read_popularity(version, manifest, table["id"].to_numpy())
    if counts is not None:
        order = np.argsort(-counts, kind="stable")
        table, counts = table.take(order), counts[order]
    return ItemCatalogue(
        counts=counts,
        tokens=table["token"].combine_chunks(),
        titles=_read_titles(version, manifest, table),
    )


def _read_popularity(
    version: ReadablePath, manifest: Manifest, ids: np.ndarray
) -> np.ndarray | None:
    """Events of the train rows by item, int64 `[items]`; None where nothing was counted."""
    item_counts = read_counts(version, manifest).get("item")
    if item_counts is None:
        return None
    counts = np.zeros(int(max(ids.max(initial=0), item_counts.ids.max(initial=0))) + 1, np.int64)
    counts[item_counts.ids] = item_counts.events
    return counts[ids]


def _read_titles(version: ReadablePath, manifest: Manifest, vocabulary: pa.Table) -> dict[str, str]:
    """Titles by token: a plain text of the item whose name says that it is one."""
    named = [
        spec.name
        for spec in manifest.schema.by_role("item", "id")
        if (spec.dtype, spec.is_list, spec.encoding) == ("bytes", False, "identity")
        and any(word in spec.name.lower() for word in ("title", "name"))
    ]
    if not named or not manifest.has_split(CATALOG):
        return {}
    tokens = dict(zip(vocabulary["id"].to_pylist(), vocabulary["token"].to_pylist(), strict=True))
    read = [WireFeature(manifest.require_key("item"), "int64"), WireFeature(named[0], "bytes")]
    titles: dict[str, str] = {}
    for shard in manifest.split(CATALOG).shards:
        path, slots = str(version / shard.path), manifest.slots
        for batch in read_batches(path, read, opener=FileOpener(), slots=slots):
            for item, title in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if item in tokens and title is not None:
                    titles[str(tokens[item])] = title.decode("utf-8", "replace")
    return titles


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
        validations: Lines of `validations.jsonl`, in order.
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
    validations: tuple[Mapping[str, Any], ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved training config, empty where the card has none."""
        return as_mapping(self.card.get("config"))

    @property
    def model_name(self) -> str:
        """The model's name as people write it."""
        name = as_mapping(self.config.get("model")).get("name")
        return str(name).replace("_", " ").upper() if name else "The model"

    def title(self, metric: str) -> str:
        """Returns a metric's name as papers write it, of several tasks with the task in front."""
        return metric_title(
            metric, first_of_several(as_mapping(self.config.get("model")).get("tasks"))
        )

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
    find_file = {path.name: path for path in run.iterdir()}.get
    _register_own_metrics(card)
    gaps = {part: why for part, file, why in _NOT_YET if not find_file(file)}
    attempt = partial(_attempt, gaps)
    version = attempt("dataset", resolve_version, attempt("dataset", _find_dataset, card))
    manifest = attempt("dataset", read_manifest, version, _shard_policy(card))
    return RunData(
        run,
        card,
        epochs=attempt("history", _read_history, find_file(HISTORY_FILE)) or (),
        metrics=attempt("metrics", read_json, find_file(METRICS_FILE)),
        version=version,
        manifest=manifest,
        catalogue=attempt("catalogue", read_catalogue, version, manifest),
        lists=attempt("lists", _read_lists, find_file(RECOMMENDATIONS_FILE)) or (),
        gaps=gaps,
        steps=attempt("steps", _read_lines, find_file(STEPS_FILE)) or (),
        validations=attempt("validations", _read_lines, find_file(VALIDATIONS_FILE)) or (),
    )


def _register_own_metrics(card: Mapping[str, Any]) -> None:
    """Notes which way metrics of one's own are better, as the run's config says."""
    evaluation = as_mapping(as_mapping(card.get("config")).get("evaluation"))
    for name, metric in as_mapping(evaluation.get("metrics")).items():
        direction = as_mapping(metric).get("direction")
        if str(name).startswith(OWN_PREFIX) and direction in ("higher", "lower"):
            register_metric(str(name), direction)


def _attempt(gaps: dict[str, str], part: str, read: Callable[..., T], *given: Any) -> T | None:
    """Reads from what is given, or notes a gap; None where any of it is missing."""
    if None in given:
        return None
    try:
        return read(*given)
    except SluiceError as error:
        received = "" if error.received is None else f" ({error.received})"
        gaps[part] = f"{error.what[:1].upper()}{error.what[1:]}{received}."
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        gaps[part] = f"It cannot be read: {error!r}"
    return None


def _shard_policy(card: Mapping[str, Any]) -> ToleratesShard:
    """Shards that the run itself was allowed to skip do not hide the dataset."""
    policy = as_mapping(as_mapping(card.get("config")).get("input")).get("on_corrupt", "fail")
    return InputConfig.model_construct(on_corrupt=policy).tolerates


def _find_dataset(card: Mapping[str, Any]) -> ReadablePath:
    """The version that the card names, else the dataset of the config."""
    configured = as_mapping(card.get("config")).get("dataset")
    named = as_mapping(card.get("dataset")).get("path") or configured
    if not isinstance(named, str):
        raise InputDataError("The run card does not say which dataset it was trained on.")
    return find_path(named)


def _read_history(file: Path) -> tuple[Mapping[str, Any], ...]:
    data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise InputDataError(f"{file} must hold a list of epochs", received=type(data).__name__)
    return tuple(data)


def _read_lines(file: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines up to the first damaged one: a run that is going on may be writing its last."""
    lines: list[Mapping[str, Any]] = []
    with suppress(ValueError), file.open(encoding="utf-8") as handle:
        lines.extend(as_mapping(json.loads(line)) for line in handle)
    return tuple(lines)


def _read_lists(file: Path) -> tuple[RankedList, ...]:
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        lines = list(islice(iter(lambda: handle.readline(_LONGEST_LINE_CHARS), ""), SAMPLE_USERS))
    return tuple(_ranked_list(json.loads(line)) for line in lines)


def _ranked_list(found: Mapping[str, Any]) -> RankedList:
    items, scores = map(str, found["items"]), map(float, found.get("scores", ()))
    name = next(found[key] for key in ("user", "id", "row") if key in found)
    return RankedList(str(name), tuple(items), tuple(scores))
