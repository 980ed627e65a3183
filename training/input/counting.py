"""How many rows and steps an epoch has.

The manifest's counts tell it without reading anything, unless rows are left out: by a filter, a
held-out share, or because they are damaged. Then the split is counted once, reading only what the
filter looks at; the number is kept per process, and beside the run where a file is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from conf.dataset import write_text_atomic
from conf.errors import InputDataError, TooFewRowsError
from conf.schema import fingerprint
from training.input.damage import InputCounts
from training.input.reading import ReadOptions, Source, build_stream
from training.input.stream import read_epoch

_COUNTED: dict[str, int] = {}


def count_rows(source: Source, file: Path | None = None) -> int:
    """Returns how many rows a source gives to all its workers.

    Args:
        source: The split, as it is read.
        file: Where counts are kept from process to process; made if it is not there.

    Raises:
        InputDataError: A shard is damaged or missing where that is not to be passed over.
    """
    return sum(_count_workers(source, file))


def count_steps(source: Source, file: Path | None = None) -> int:
    """Returns the steps of an epoch: whole batches, of which each worker makes its part.

    Args:
        source: The train split, as it is read.
        file: As for `count_rows`.

    Raises:
        InputDataError: There is no whole batch, or as for `count_rows`.
    """
    steps = min(rows // source.batch_size for rows in _count_workers(source, file))
    if source.config.mix:
        steps = int(steps / (1 - sum(part.weight for part in source.config.mix)))
    if not steps:
        raise build_size_error(source, count_rows(source, file))
    return steps


def build_size_error(source: Source, rows: int) -> InputDataError:
    """Returns the error of a split that does not fill one batch.

    Args:
        source: The split, as it is read.
        rows: Rows that it gives.
    """
    listed = source.manifest.split(source.split).rows
    if rows:
        fix = f"set input.batch_size to {rows} or less, or add data"
    elif listed:
        fix = "let input.filter, input.validation and input.on_corrupt leave rows"
    else:
        fix = "build the dataset with rows in this split, or train on another version"
    kind = TooFewRowsError if listed else InputDataError
    return kind(
        f"the {source.split} split is {'smaller than one batch' if rows else 'empty'}",
        received=f"{rows} rows" + ("" if rows == listed else f" that the input leaves of {listed}"),
        allowed=f"at least input.batch_size = {source.config.batch_size} rows",
        fix=fix,
    )


def _count_workers(source: Source, file: Path | None) -> Sequence[int]:
    workers = source.options.worker[1]
    if source.config.is_exact:
        return [sum(rows for _, rows in source.ranges(worker)) for worker in range(workers)]
    return [_count_kept(source, worker, file) for worker in range(workers)]


def _count_kept(source: Source, worker: int, file: Path | None) -> int:
    config = source.config
    # Not the place: a run that goes on elsewhere keeps its number of steps.
    key = fingerprint(
        {
            "shards": [[s.path, s.crc32c] for s in source.manifest.split(source.split).shards],
            "version": f"{source.manifest.dataset_name}/{source.manifest.dataset_version}",
            "filter": [item.model_dump(mode="json") for item in config.filter],
            "validation": config.validation and config.validation.model_dump(mode="json"),
            "held_out": source.is_held_out,
            "take": config.take,
            "on_corrupt": config.on_corrupt,
            "worker": [worker, source.options.worker[1]],
        }
    )
    kept, own = _read_counts(file), f"{source.version_dir}\0{key}"
    if key in kept:
        _COUNTED[own] = kept[key]
    elif own not in _COUNTED:
        _COUNTED[own] = _read_through(source, worker)
    if file is not None and key not in kept:
        write_text_atomic(file, json.dumps({**kept, key: _COUNTED[own]}, indent=1) + "\n")
    return _COUNTED[own]


def _read_through(source: Source, worker: int) -> int:
    workers = source.options.worker[1]
    options = ReadOptions(worker=(worker, workers), counts=InputCounts())
    plain = source.config.model_copy(update={"cache": None, "cache_dir": None, "mix": ()})
    counted = Source(
        source.version_dir, source.manifest, source.split, plain, options, source.is_held_out
    )
    return sum(rows.count for rows in read_epoch(build_stream(counted, (), None), 0))


def _read_counts(file: Path | None) -> dict[str, int]:
    if file is None or not file.exists():
        return {}
    try:
        counts = dict(json.loads(file.read_text(encoding="utf-8")))
        return {str(key): int(rows) for key, rows in counts.items()}
    except (ValueError, TypeError):  # damaged: count again
        return {}
