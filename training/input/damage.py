"""Damaged input: what is skipped and counted, and its errors carried through TensorFlow."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import tensorflow as tf

from conf.artefacts.dataset import list_unlisted_files
from conf.errors import SluiceError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.storage.locations import is_remote
from etl.tfrecord.reading import FIX_CORRUPT, BadRange, CorruptRecordError

_LOGGER = logging.getLogger(__name__)
_WARNED: set[str] = set()


@dataclass
class InputCounts:
    """What the input left out; safe to read and write from several threads.

    Attributes:
        records: Bad records by reason.
        shards: Shards that were left out, with the reason.
        filtered: Rows that a filter left out.
        first_bad: Where the first bad record was met.
    """

    records: Counter[str] = field(default_factory=Counter)
    shards: dict[str, str] = field(default_factory=dict)
    filtered: int = 0
    first_bad: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_record(self, path: str, offset: int, reason: str) -> None:
        """Counts a bad record."""
        with self._lock:
            self.records[reason] += 1
            self.first_bad = self.first_bad or f"{path}, byte offset {offset}"

    def add_lost(self, path: str, records: int) -> None:
        """Counts records of a damaged shard of which no trace is left."""
        with self._lock:
            self.records["not there, though the manifest counts it"] += records
            self.first_bad = self.first_bad or f"{path}, which ends early"

    def add_shard(self, path: str, reason: str) -> None:
        """Counts a shard that is left out, once however often it is met."""
        with self._lock:
            self.shards[path] = reason

    def add_filtered(self, rows: int) -> None:
        """Counts rows that a filter left out."""
        with self._lock:
            self.filtered += rows

    def totals(self) -> dict[str, int]:
        """What was left out: `bad_records`, `shards`, `filtered_rows`; empty where nothing was."""
        with self._lock:
            found = {
                "bad_records": sum(self.records.values()),
                "shards": len(self.shards),
                "filtered_rows": self.filtered,
            }
        return {name: count for name, count in found.items() if count}

    def describe(self) -> list[str]:
        """One line for each kind of loss; none where nothing was left out."""
        with self._lock:
            lines = []
            if self.records:
                reasons = ", ".join(f"{n} x {why}" for why, n in sorted(self.records.items()))
                total = sum(self.records.values())
                lines.append(f"{total} bad record(s) skipped: {reasons}; first: {self.first_bad}")
            lines += [f"shard skipped: {path}: {why}" for path, why in sorted(self.shards.items())]
            if self.filtered:
                lines.append(f"{self.filtered} row(s) left out by input.filter or input.validation")
            return lines


@dataclass(frozen=True)
class DamagePolicy:
    """What becomes of damage.

    Attributes:
        on_corrupt: `fail`, `skip_record` or `skip_shard`.
        counts: Counts what is left out.
    """

    on_corrupt: str = "fail"
    counts: InputCounts = field(default_factory=InputCounts)

    def hook(self, path: str) -> Callable[[BadRange], None] | None:
        """What a reader of a file is given; None lets it raise."""
        if self.on_corrupt != "skip_record":
            return None

        def count(bad: BadRange) -> None:
            if not bad.continues:
                self.counts.add_record(path, bad.offset, bad.reason)

        return count


def warn_unlisted(version_dir: str, manifest: Manifest) -> None:
    """Warns, once per process, of files beside the shards that the manifest does not list."""
    if version_dir in _WARNED or is_remote(version_dir):
        return
    _WARNED.add(version_dir)
    unlisted = list_unlisted_files(version_dir, manifest)
    if unlisted:
        _LOGGER.warning(
            "%s: %d file(s) are not in the manifest and are not read, first: %s",
            version_dir, len(unlisted), unlisted[0],
        )  # fmt: skip


_MARK = "sluice-input-error-"
_TOKEN = re.compile(_MARK + "([0-9a-f]{32})")
_MOST_KEPT = 64
_FIX_CORRUPT = (
    f"{FIX_CORRUPT}; or set input.on_corrupt to skip_record or skip_shard, which train on the rest"
)
_KEPT: dict[str, SluiceError] = {}
_LOCK = threading.Lock()


class CarriedError(RuntimeError):
    """Stands for an error of the input inside TensorFlow's runtime, which keeps its text alone."""


def carry(error: SluiceError) -> CarriedError:
    """Returns the error to raise inside a dataset in place of one of Sluice's own."""
    token = uuid.uuid4().hex
    with _LOCK:
        _KEPT[token] = error
        while len(_KEPT) > _MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
    return CarriedError(f"{_MARK}{token}: {error}")


def is_carried(error: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow's runtime stands for one of the input."""
    return _TOKEN.search(error.message) is not None


@contextmanager
def input_errors(version_dir: ReadablePath, manifest: Manifest, split: str) -> Iterator[None]:
    """Raises an input's error as what it was before it went through TensorFlow's runtime.

    Iterate datasets of `training.input` inside this context.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        split: The split that is read.

    Raises:
        InputDataError: A record or a shard is damaged or missing, or does not hold what the
            schema says; names the file and where in it.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = _TOKEN.search(error.message)
        with _LOCK:
            carried = None if found is None else _KEPT.get(found[1])
        if carried is None:
            raise
        if split == "train" and isinstance(carried, CorruptRecordError):
            carried.fix = _FIX_CORRUPT
        carried.add_note(f"in split {split!r} of {manifest.dataset_name!r} at {version_dir}")
        raise carried from error
