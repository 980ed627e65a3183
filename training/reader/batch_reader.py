"""Batches of a dataset version as dictionaries of NumPy arrays, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError, SluiceError
from conf.manifest import Manifest
from conf.schema import FeatureSpec, fingerprint
from conf.storage.locations import find_path
from training.reader.bare_shards import describe_shards
from training.reader.batch_plan import (
    BatchPlan,
    BatchRequest,
    BatchShape,
    RequestedBatches,
    build_share_error,
    build_source,
    request_batches,
)
from training.reader.damage import InputCounts, explain_error, warn_of_losses
from training.reader.decoded_rows import DecodedRows, RaggedList
from training.reader.feature_columns import select_features, split_features
from training.reader.mixing import find_mixed
from training.reader.shares import BatchShare

Arrays = dict[str, np.ndarray | RaggedList]
"""A batch: numbers `[batch]` or `[batch, length]`, byte strings as objects, lists of any length."""
T = TypeVar("T")

_FORMAT = 1
# A number in JSON is exact up to 2^53, which is 13 digits of 16.
_DIGITS = 13
# Keys of `input` that decide which rows an epoch has; in the second group, in which order.
_WHICH_ROWS = ("filter", "validation", "take", "on_corrupt")
_WHICH_ORDER = ("class_balance", "bucket_boundaries", "shuffle_buffer", "interleave_shards")


@dataclass(frozen=True)
class _Identity:
    """What a state must agree with, as numbers.

    Attributes:
        seed: Seed of the order.
        batch_size: Rows of a batch, of all ranks.
        version: Stands for the dataset version, and those that are mixed into it.
        rows: Stands for what decides which rows there are, and their order.
    """

    seed: int
    batch_size: int
    version: int
    rows: int


_WHAT = {
    "seed": ("another seed", "open the batches with the seed that the state names"),
    "batch_size": (
        "batches of another size",
        "open the batches with the batch_size that the state names; it counts the rows of all "
        "ranks, whose number may change",
    ),
    "version": (
        "another dataset version, or another split",
        "open the version that the state was taken from by its own directory, and the same split",
    ),
    "rows": (
        "other rows, or another order of them",
        "give split, held_out, shuffle, drop_remainder, "
        f"{', '.join((*_WHICH_ROWS, 'mix', *_WHICH_ORDER))} as they were",
    ),
}


class BatchReader:
    """Reads epoch after epoch of batches; `open_batches` makes it.

    An iterator gives the rest of the epoch that the reader stands in, and the next one the next
    epoch. It may be copied and pickled into other processes.

    Args:
        batches: What is read.
        share: Part of each batch that this process takes.
        first_epoch: Epoch to begin with.

    Attributes:
        epoch: Epoch that the reader stands in, from 0.
        batch: Batches of it that have been handed out.
        batches_per_epoch: Batches of a whole epoch, the same for all ranks; None where only
            reading tells.
    """

    def __init__(self, batches: RequestedBatches, share: BatchShare, first_epoch: int = 0) -> None:
        self._batches, self._share = batches, share
        self.epoch, self.batch = first_epoch, 0
        self.batches_per_epoch = batches.count(share.ranks)
        # What does not fit the dataset is said here, not by the first batch.
        self._shape = batches.plan().shape
        self._identity = _identify(batches)

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The features of a batch, with types, shapes and sizes of vocabularies."""
        return tuple(column.spec for column in self._shape.columns)

    def __iter__(self) -> Iterator[Arrays]:
        """Reads the rest of the epoch.

        Raises:
            InputDataError: A shard is damaged or missing, or a record is not what the schema says.
        """
        return self.track(self.read_part())

    def read_part(self, worker: int = 0, workers: int = 1) -> Iterator[Arrays]:
        """Reads every so manieth batch of the epoch's rest, in a worker of a data loader.

        Batches in turn from worker 0, 1, … are those of one reader, in its order. The main
        process counts them by `track`.

        Args:
            worker: Number of the worker, from 0.
            workers: How many there are.

        Raises:
            ConfigError: There is no such worker.
            InputDataError: As for an iterator.
        """
        _check_number("worker", (worker, workers))
        share = replace(self._share, worker=worker, workers=workers)
        # Where the reader stands now, not where it stands when the first batch is taken.
        return self._read(self.epoch, self.batch, share)

    def _read(self, epoch: int, batch: int, share: BatchShare) -> Iterator[Arrays]:
        counts, source = InputCounts(), self._batches.source
        plan = _plan_for_worker(self._batches, counts, share.workers)
        is_empty = batch == 0 and share.worker == 0
        try:
            for rows in plan.read_part(epoch, batch, share):
                is_empty = False
                yield _build_arrays(plan.shape, rows)
        except SluiceError as error:
            explain_error(error, source.version_dir, source.manifest, source.split)
            raise
        if is_empty:
            raise build_share_error(source.split, share.ranks)
        if source.config.on_corrupt != "fail":
            warn_of_losses(counts, source.split, epoch)
        self.epoch, self.batch = epoch + 1, 0

    def track(self, batches: Iterable[T]) -> Iterator[T]:
        """Hands on batches of the epoch's rest, and moves the reader as it does.

        Args:
            batches: What a data loader makes of the batches that its workers read.
        """
        epoch, batch = self.epoch, self.batch
        for number, one in enumerate(batches, start=batch + 1):
            self.epoch, self.batch = epoch, number
            yield one
        self.epoch, self.batch = epoch + 1, 0

    def state(self) -> dict[str, int]:
        """Returns where the reader stands, behind the batch that was handed out last.

        The numbers fit into JSON. They do not depend on the rank or the number of ranks.
        """
        return {
            "format": _FORMAT, "epoch": self.epoch, "batch": self.batch, **vars(self._identity),
        }  # fmt: skip

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to where a reader stood; what follows is, bit for bit, what followed there.

        Args:
            state: What `state` returned, to a reader of any rank and number of ranks.

        Raises:
            ConfigError: It is no state, or one of another version, seed, batch size or choice of
                rows.
        """
        expected = {"format": _FORMAT, **vars(self._identity)}
        _check_state(state, {*expected, "epoch", "batch"})
        for name, value in expected.items():
            if state[name] != value:
                what, fix = _WHAT.get(name, ("another release", "begin anew"))
                raise ConfigError(
                    f"the state of a reader is of {what}",
                    received=f"{name} {state[name]}", allowed=f"{name} {value}", fix=fix,
                )  # fmt: skip
        most = self._batches.count()  # Fewer ranks may have had one more.
        if most is not None and state["batch"] > most:
            raise ConfigError(
                "the state of a reader lies behind the end of an epoch",
                received=f"batch {state['batch']}",
                allowed=f"0 to {most}",
                fix="restore the state as it was saved",
            )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])


def open_batches(
    source: str | Path | Sequence[str | Path],
    batch_size: int,
    split: str = "train",
    *,
    features: Sequence[str] | None = None,
    ragged: Sequence[str] = (),
    schema: Sequence[FeatureSpec] | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    first_epoch: int = 0,
    drop_remainder: bool = False,
    held_out: bool = False,
    rank: tuple[int, int] = (0, 1),
    **options: Any,
) -> BatchReader:
    """Opens a split of a dataset version, or bare TFRecord files, for a training loop of one's own.

    A batch is a dictionary of NumPy arrays: scalars `[batch]`, lists padded to `[batch, max_len]`
    (without `max_len`: to the longest list that the statistics count), other lists as
    `RaggedList`. Rows, order and values are those of `open_dataset`. Needs neither TensorFlow nor
    Spark.

    Args:
        source: Directory or URI of a dataset (its current version), or of one version; or a list
            of TFRecord files, which are read as one split.
        batch_size: Rows per batch of all ranks together; a multiple of their number.
        split: Name of the split.
        features: Features to read; None reads all but those of role id.
        ragged: Features to give as `RaggedList` although their length is bounded.
        schema: What bare files hold; None finds out by reading them through. Not for versions.
        shuffle: Whether to draw rows in random order; None: those of train alone.
        seed: Seed of the order.
        first_epoch: Epoch to begin with.
        drop_remainder: Whether to drop rows at the end that fill no batch.
        held_out: Whether to read the rows of train that `validation` keeps apart instead.
        rank: Number of this rank and of all of them. Each takes its rows of every batch, so all
            have as many batches; what is left at the end without a row for each is dropped.
        options: Keys of the config's `input` section, such as `shuffle_buffer`, `filter`, `take`,
            `cache`, `on_corrupt`, `validation`.

    Raises:
        ConfigError: There is no such rank, an argument is of another type, or an option is unknown
            or does not fit the dataset.
        InputDataError: There is no such split or feature, or the split is empty or does not fill
            a batch.
        UpstreamNotReadyError: There is no such dataset.
    """
    _check_number("rank", rank)
    for name, value, least in (
        ("batch_size", batch_size, 1), ("seed", seed, 0), ("first_epoch", first_epoch, 0),
    ):  # fmt: skip
        _require_whole(name, value, least)
    # NumPy's whole numbers would stay what they are in a state, which JSON does not take.
    batch_size, seed, first_epoch = int(batch_size), int(seed), int(first_epoch)
    rank = (int(rank[0]), int(rank[1]))
    _check_names(source, features)
    if batch_size % rank[1]:
        raise ConfigError(
            "batch_size must be a multiple of the number of ranks",
            received=f"{batch_size} rows on {rank[1]} ranks",
            allowed=f"a multiple of {rank[1]}; it counts the rows of all ranks",
        )
    request = BatchRequest(split, shuffle, seed, drop_remainder, held_out, tuple(ragged))
    config = request.build_config(batch_size, options, "open_batches")
    if not isinstance(source, str | Path):
        version_dir, manifest = describe_shards(source, split, schema, config.on_corrupt)
    elif schema is not None:
        raise ConfigError(
            "schema is for bare files: a dataset version has its own",
            received=str(source),
            fix="leave schema out, or give a list of files",
        )
    else:
        version_dir = resolve_version(find_path(source))
        manifest = read_manifest(version_dir, config.tolerates)
    names = _choose_features(manifest, split) if features is None else features
    chosen = build_source(version_dir, manifest, config, request)
    share = BatchShare(*rank)
    return BatchReader(request_batches(chosen, request, names), share, first_epoch)


def _choose_features(manifest: Manifest, split: str) -> list[str]:
    specs = select_features(manifest, split_features(manifest, split))
    return [spec.name for spec in specs if spec.role != "id"]


def _check_number(what: str, given: tuple[int, int]) -> None:
    is_pair = isinstance(given, Sequence) and len(given) == 2
    if not is_pair or not all(map(_is_whole, given)) or not given[0] < given[1]:
        raise ConfigError(
            f"there is no such {what}",
            received=f"{what} {given[0]} of {given[1]}" if is_pair else repr(given),
            allowed=f"(number, {what}s), whole numbers with 0 <= number < {what}s",
        )


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, 0 or more; arrays of checkpoints have such of NumPy's."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and int(value) >= 0


def _require_whole(name: str, value: Any, least: int) -> None:
    if not _is_whole(value) or value < least:
        raise ConfigError(
            f"{name} is no such number",
            received=repr(value), allowed=f"a whole number, {least} or more",
        )  # fmt: skip


def _check_names(source: Any, features: Any) -> None:
    """Refuses what names neither a dataset nor files, and features that are no names."""
    files = source if _is_list(source) else [source]
    if not all(isinstance(file, str | Path) for file in files):
        raise ConfigError(
            "this names no dataset",
            received=repr(source)[:300],
            allowed="a directory or URI of a dataset, or a list of TFRecord files",
        )
    named = [] if features is None else features
    if not _is_list(named) or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            "features must be a list of names",
            received=repr(features)[:300],
            allowed='such as ["user_id", "history"], or None for all',
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _check_state(state: Mapping[str, int], names: set[str]) -> None:
    is_state = isinstance(state, Mapping) and set(state) == names
    if not is_state or not all(_is_whole(value) for value in state.values()):
        raise ConfigError(
            "this is no state of a reader",
            received=str(state)[:300],
            allowed=f"whole numbers, 0 or more: {', '.join(sorted(names))}",
            fix="restore what state() returned",
        )


def _identify(batches: RequestedBatches) -> _Identity:
    source, request = batches.source, batches.request
    config, names = source.config, [spec.name for spec in batches.specs]
    versions = [(source.manifest, source.split)]
    mixed = find_mixed(config, source.manifest, names)
    versions += [(manifest, source.split) for _, manifest in mixed]
    rows: dict[str, Any] = {
        "split": [source.split, request.held_out, request.drop_remainder, request.is_shuffled]
    }
    keys = (*_WHICH_ROWS, *_WHICH_ORDER) if request.is_shuffled else _WHICH_ROWS
    rows.update(config.model_dump(mode="json", include=set(keys)))
    rows["mix"] = [part.weight for part in config.mix]
    # The length of a row is that of the longest list that is read of it.
    rows["lists"] = names if config.bucket_boundaries else []
    return _Identity(
        request.seed,
        config.batch_size,
        _number([_outline(manifest, split) for manifest, split in versions]),
        _number(rows),
    )


def _outline(manifest: Manifest, split: str) -> list[Any]:
    shards = [[s.path, s.rows, s.crc32c] for s in manifest.split(split).shards]
    return [manifest.dataset_name, manifest.dataset_version, shards]


def _number(value: Any) -> int:
    return int(fingerprint(value)[:_DIGITS], 16)


def _plan_for_worker(batches: RequestedBatches, counts: InputCounts, workers: int) -> BatchPlan:
    """The plan of one of several workers, which share the threads of the machine."""
    plan, source = batches.plan(counts), batches.source
    if source.config.parallel_parses is not None or workers == 1:
        return plan
    threads = max(1, plan.rows.threads // workers)
    config = source.config.model_copy(update={"parallel_parses": threads})
    return replace(batches, source=replace(source, config=config)).plan(counts)


def _build_arrays(shape: BatchShape, rows: DecodedRows) -> Arrays:
    arrays: Arrays = {}
    for column in shape.columns:
        value = rows.array(column.name)
        if isinstance(value, RaggedList):
            if column.is_ragged:  # Arrow's memory cannot be written to.
                value = RaggedList(value.values.copy(), value.offsets)
            else:
                value = value.pad(column.length, column.pad)
        arrays[column.name] = value
    return arrays
