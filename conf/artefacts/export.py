"""Paths of exported models, and what a version says of itself.

DIR may lie in an object store; what only reads takes a path or a place there (`ReadablePath`).

DIR/models.config     what `--model_config_file` of TensorFlow Serving reads
DIR/<model>/<n>/      a version, from 1 on; whole as soon as it has its name
    export.json       what it is, how to call it, checksums
    index/<m>/        an index of its items, from 1 on; whole as soon as it has its name
        index.json    of which version it is, recall and latency, checksums
DIR/<model>/.withdrawn/<n>/     a version that was withdrawn
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from conf.artefacts.entries import check_entry_name
from conf.artefacts.run import read_json
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.paths import (
    ReadablePath,
    ReadablePathT,
    list_folders,
    open_sizes,
    require_bucket,
)
from conf.publication.entries import WITHDRAWN_DIR, hold_numbers, list_complete
from conf.schema import fingerprint

EXPORT_FILE = "export.json"
EXPORT_FORMAT_VERSION = 2
MODELS_CONFIG = "models.config"
WARMUP_FILE = "assets.extra/tf_serving_warmup_requests"
EMBEDDINGS_DIR = "embeddings"
TABLES_DIR = "tables"
USERS_FILE = "users.parquet"
ITEMS_FILE = "items.parquet"
KEY, ID, VECTOR, VECTORS = "key", "id", "vector", "vectors"
SEEN, FEATURE_PREFIX = "seen", "feature:"
"""Columns of tables of users and items: raw key, id, embedding, items met, features."""
PART, ROW, LINE, TIMES = "__sluice_part", "__sluice_row", "value", "__sluice_times"
"""Columns of rows that Spark brings to be predicted: numbers of partition and row, from 0; of JSON
the line, and its times."""
INDEX_DIR = "index"
INDEX_CARD = "index.json"
INDEX_FORMAT_VERSION = 1
DEFAULT_SIGNATURE, TOP_K = "serving_default", "top_k"
SCORE_ITEMS, RANK_ITEMS = "score_items", "rank_items"
"""Signatures of scores of items by their keys, and of what orders them: log-odds, as probabilities
near 1 tie."""
ENCODED, ENCODED_SUFFIX = "encoded", "_encoded"
"""The signature of a ranking model that takes features as the records hold them, and what ends the
names of the others that do."""
ROW_FEATURES = "row_features"
"""From raw values of a row to what the encoded ones take of it, which the records hold."""


class IndexKind(StrEnum):
    """How items are found: all of them compared, cells of k-means, a graph of near neighbours."""

    EXACT = "exact"
    IVF = "ivf"
    HNSW = "hnsw"


@dataclass(frozen=True)
class IndexOptions:
    """How an index is built.

    Attributes:
        kind: None: by the number of items.
        items_file: Columns of the items, by which lists are filtered; the first one is the key.
        keep: Versions of the index that are kept, the newest ones; None: all.
    """

    kind: IndexKind | None = None
    items_file: Path | None = None
    keep: int | None = None


class Give(StrEnum):
    """What batch scoring gives for each row."""

    SCORES = "scores"
    LISTS = "lists"
    USER_EMBEDDING = "user_embedding"
    ITEM_EMBEDDING = "item_embedding"


@dataclass(frozen=True)
class ExportOptions:
    """Where an export goes.

    Attributes:
        directory: Directory of all models; None: `export/` of the run.
        name: Name of the model; None: that of the run's series.
        keep: Versions that are kept, the newest ones; None: all.
        k: Length of the lists of a retrieval model's default signature.
        tables: Whether every embedding table is written too.
        once: Whether a run that has a version there, withdrawn or not, gets no further one.
        index: How an index of the items is built along with it; None: there is none.
    """

    directory: ReadablePath | None = None
    name: str | None = None
    keep: int | None = None
    k: int = 100
    tables: bool = False
    once: bool = False
    index: IndexOptions | None = None

    def __post_init__(self) -> None:
        """Refuses a name that could leave the directory.

        Raises:
            ConfigError: The name is not a plain file name.
        """
        if self.name is not None:
            check_entry_name("model", self.name)


def list_models(base: ReadablePathT) -> list[ReadablePathT]:
    """Returns the directories of models that have a version."""
    directories = [base / name for name in sorted(list_folders(base))]
    return [path for path in directories if list_versions(path)]


def list_versions(model: ReadablePath) -> list[int]:
    """Returns the versions of a model that are whole, ascending."""
    return list_complete(model, EXPORT_FILE)


def find_version(path: ReadablePathT) -> ReadablePathT:
    """Returns a version's directory.

    Args:
        path: One, or that of a model (its newest version), or that of a single model's directory.

    Raises:
        UpstreamNotReadyError: There is none.
    """
    if (path / EXPORT_FILE).is_file():
        return path
    if versions := list_versions(path):
        return path / str(versions[-1])
    models = list_models(path)
    if len(models) == 1:
        return find_version(models[0])
    require_bucket(path)
    raise UpstreamNotReadyError(
        "there is no exported model",
        received=str(path),
        allowed=", ".join(str(model) for model in models) or None,
        fix="name one of them" if models else "write one by `sluice export`",
    )


def read_card(version: ReadablePath) -> dict[str, Any]:
    """Reads `export.json` of a version.

    Raises:
        UpstreamNotReadyError: It is not there.
        InputDataError: It is damaged.
    """
    return read_json(version / EXPORT_FILE)


def seal_card(card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `export.json` says with the fingerprint of all of it."""
    rest = _drop_fingerprint(card)
    return {**rest, "fingerprint": fingerprint(rest)}


def is_sealed(card: Mapping[str, Any]) -> bool:
    """Whether `export.json` says what was written: it is that of its fingerprint."""
    return fingerprint(_drop_fingerprint(card)) == card["fingerprint"]


def _drop_fingerprint(card: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in card.items() if key != "fingerprint"}


@dataclass(frozen=True)
class ExportedVersion:
    """A version of a model.

    Attributes:
        path: Its directory.
        number: Its number.
        run: Directory or URI of the run that it was exported from.
        dataset_version: Id of the dataset version that the run was trained on.
        is_withdrawn: Whether it was withdrawn.
        checkpoint: Epoch and batch of the run's checkpoint; None: it was not exported from one.
    """

    path: ReadablePath
    number: int
    run: str
    dataset_version: str
    is_withdrawn: bool
    checkpoint: tuple[int, int] | None = None

    @classmethod
    def read(cls, path: ReadablePath, *, is_withdrawn: bool = False) -> ExportedVersion:
        """Reads what a version says of itself.

        Raises:
            InputDataError: `export.json` is damaged.
        """
        card = read_card(path)
        try:
            run, dataset_version = str(card["run_path"]), str(card["dataset_version"])
            point = card.get("checkpoint")
            checkpoint = None if point is None else (point["epoch"], point["batch"])
        except KeyError as error:
            raise InputDataError(
                f"{path / EXPORT_FILE} does not name its run and dataset version",
                received=f"no {error}",
                fix="export the run again",
            ) from error
        return cls(path, int(path.name), run, dataset_version, is_withdrawn, checkpoint)


def read_versions(model: ReadablePath) -> list[ExportedVersion]:
    """Reads the versions of a model that are whole, withdrawn ones too, by number.

    Raises:
        UpstreamNotReadyError: It has none.
        InputDataError: An `export.json` is damaged.
        ConfigError: The object store cannot be reached or refuses, or has no such bucket.
    """
    # In a store one that is being withdrawn is in both places for a while.
    places = [model / WITHDRAWN_DIR, model]
    found = {
        number: ExportedVersion.read(base / str(number), is_withdrawn=base is places[0])
        for base in places
        for number in list_versions(base)
    }
    if not found:
        require_bucket(model)
        raise UpstreamNotReadyError(
            "this model has no exported version",
            received=model,
            allowed="DIR/MODEL, where `sluice export --to DIR --name MODEL` writes",
            fix="write one by `sluice export`",
        )
    return [found[number] for number in sorted(found)]


def find_exports(
    model: ReadablePath, run: str, checkpoint: tuple[int, int] | None = None
) -> list[ExportedVersion]:
    """Returns the versions of a model that were exported from a run, withdrawn ones too.

    Args:
        model: Directory of the model.
        run: The run as `export.json` names it: its absolute path, or its URI.
        checkpoint: Epoch and batch of the one that they are of; None: of any.
    """
    try:
        versions = read_versions(model)
    except UpstreamNotReadyError:
        return []
    of_run = [version for version in versions if version.run == run]
    return [v for v in of_run if checkpoint is None or v.checkpoint == checkpoint]


def find_published(model: ReadablePath, before: str | None = None) -> ExportedVersion:
    """Returns the newest version of a model that is not withdrawn.

    Args:
        model: Directory of the model.
        before: Id of a dataset version: only models of earlier ones count; None: all do.

    Raises:
        UpstreamNotReadyError: There is none.
        InputDataError: An `export.json` is damaged.
    """
    for version in reversed(read_versions(model)):
        is_earlier = before is None or version.dataset_version < before
        if is_earlier and not version.is_withdrawn:
            return version
    raise UpstreamNotReadyError(
        "no version of this model is published",
        received=model if before is None else f"{model}, trained before {before}",
        fix="write one by `sluice export`",
    )


def roll_back(model: ReadablePath, to: int | None = None) -> list[int]:
    """Withdraws the newest versions of a model; servers go back to the one before.

    Args:
        model: Place of the model.
        to: The version that is the newest afterwards; None: the one before the newest.

    Returns:
        The versions that were withdrawn; none where `to` was the newest already.

    Raises:
        ConfigError: There is no such version, or none before the newest; or the store cannot be
            reached or refuses.
        InputDataError: That version is damaged; nothing was withdrawn.
        UpstreamNotReadyError: The model has no version, or is being exported now.
    """
    choose_earlier(model, to)  # A wrong path is refused before anything is written there.
    with hold_numbers(model, EXPORT_FILE) as held:
        return held.withdraw(choose_earlier(model, to))


def choose_earlier(model: ReadablePath, to: int | None = None) -> int:
    """Returns the version of a model that a roll-back makes the newest; see `roll_back`.

    Raises:
        ConfigError: There is no such version, or none before the newest.
        InputDataError: That version is damaged.
        UpstreamNotReadyError: The model has no version.
    """
    numbers = [v.number for v in read_versions(model) if not v.is_withdrawn]
    if to is None:
        to = numbers[-2] if len(numbers) > 1 else None
    if to is None or to not in numbers:
        raise ConfigError(
            "there is no version of this model to go back to",
            received=f"--to {to}" if to is not None else f"{model}, before its newest version",
            allowed=", ".join(map(str, numbers)) or "no version is published",
            fix="export an earlier run anew",
        )
    if damage := find_damage(model / str(to)):
        raise InputDataError(
            f"version {to} of {model} is damaged; nothing was withdrawn",
            received=damage,
            fix="name another one by --to",
        )
    return to


def find_damage(version: ReadablePath) -> str | None:
    """Names the first file of a version that is missing or has another size than it should.

    Raises:
        UpstreamNotReadyError: It has no `export.json`.
        InputDataError: `export.json` is damaged.
    """
    return find_unfinished(version, read_card(version)["files"])


def list_indexes(version: ReadablePath) -> list[int]:
    """Returns the indexes of a version that are whole, ascending."""
    return list_complete(version / INDEX_DIR, INDEX_CARD)


def list_files(root: Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of every file below a directory, by relative path."""
    return {
        path.relative_to(root).as_posix(): {"bytes": path.stat().st_size, "sha256": _hash(path)}
        for path in sorted(p for p in root.rglob("*") if p.is_file())
    }


def find_unfinished(root: ReadablePath, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns which file of a list is missing or has another size, in words; None: none has."""
    find_bytes = open_sizes(root)
    for name, info in files.items():
        size = find_bytes(name)
        if size != info["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            return f"{name}: {found} of {info['bytes']} bytes"
    return None


def find_damaged(root: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns which file of a list holds other bytes, in words; None: none does."""
    for name, info in files.items():
        if (found := _hash(root / name)) != info["sha256"]:
            return f"{name}: SHA-256 {found[:12]}… in place of {info['sha256'][:12]}…"
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
