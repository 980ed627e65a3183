"""Damaged input: what is skipped, and what counts it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets of it: all but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

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


def warn_of_losses(counts: InputCounts, split: str, epoch: int) -> None:
    """Warns of what an epoch of a split left out."""
    for line in counts.describe():
        _LOGGER.warning("split %r, epoch %d: %s", split, epoch, line)


class ShardChecks:
    """Which shards were begun to be read, and which were compared with their checksums."""

    def __init__(self) -> None:
        self._begun: dict[Any, None] = {}
        self._compared: set[Any] = set()

    def begin(self, shard: Any) -> None:
        """Notes that a shard is read."""
        self._begun[shard] = None

    def end(self, shard: Any) -> None:
        """Notes that a shard is what the manifest lists."""
        self._compared.add(shard)

    def select_begun(self, shards: Iterable[Any] | None = None) -> list[Any]:
        """Returns those of some shards, or of all, that were begun and not compared."""
        asked = tuple(self._begun) if shards is None else shards
        return [one for one in asked if one in self._begun and one not in self._compared]


@dataclass(frozen=True)
class DamagePolicy:
    """What becomes of damage.

    Attributes:
        on_corrupt: `fail`, `skip_record` or `skip_shard`.
        counts: Counts what is left out.
        checks: Notes what is compared with its checksum.
    """

    on_corrupt: str = "fail"
    counts: InputCounts = field(default_factory=InputCounts)
    checks: ShardChecks = field(default_factory=ShardChecks)

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


_FIX_CORRUPT = (
    f"{FIX_CORRUPT}; or set input.on_corrupt to skip_record or skip_shard, which train on the rest"
)


def explain_error(
    error: SluiceError, version_dir: ReadablePath, manifest: Manifest, split: str
) -> None:
    """Adds to an error of the input which dataset it is of, and what can be done about it."""
    if split == "train" and isinstance(error, CorruptRecordError):
        error.fix = _FIX_CORRUPT
    error.add_note(f"in split {split!r} of {manifest.dataset_name!r} at {version_dir}")
