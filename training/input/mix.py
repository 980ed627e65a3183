"""Further datasets whose train rows are mixed in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from conf.manifest import Manifest
from conf.place import Place
from conf.training.input import InputConfig
from etl.tfrecord.places import read_manifest, resolve_version
from training.input.columns import Column, check_specs, plan_columns, select_features
from training.input.counting import count_steps
from training.input.reading import Source, build_stream
from training.input.rows import Rows
from training.input.sampling import mix_rows, skip_batches
from training.input.stream import StreamConfig, read_epoch


def find_mixed(
    config: InputConfig, manifest: Manifest, names: Sequence[str]
) -> list[tuple[Place, Manifest]]:
    """Finds the datasets of `input.mix`: directory and manifest of each version.

    Args:
        config: The input's config.
        manifest: The dataset that they are mixed into.
        names: Features that are read.

    Raises:
        InputDataError: A dataset lacks a feature or has it with another type, shape or
            vocabulary; names the feature and both.
        UpstreamNotReadyError: There is no such dataset.
    """
    found: list[tuple[Place, Manifest]] = []
    specs = select_features(manifest, names)
    for part in config.mix:
        version_dir = resolve_version(part.dataset)
        other = read_manifest(version_dir, config.passes_over)
        check_specs(other, specs)
        found.append((version_dir, other))
    return found


def build_mixed_reader(
    source: Source, columns: tuple[Column, ...], own: StreamConfig, seed: int
) -> Callable[[int, int], Iterator[Rows]]:
    """Returns the function of epoch and first batch to the mixed batches from there on.

    Args:
        source: The dataset that the run trains on.
        columns: Features to deliver.
        own: Its rows.
        seed: The run's seed.

    Raises:
        InputDataError: Another dataset has no such version, or other features.
    """
    config, size = source.config, source.batch_size
    streams = [own, *_build_mix_streams(source, columns, seed)]
    weights = [1 - sum(part.weight for part in config.mix), *(part.weight for part in config.mix)]
    batches = count_steps(source)

    def read(epoch: int, batch: int) -> Iterator[Rows]:
        # Each pass of a dataset is an epoch of its own, which no other pass has.
        sources = [
            functools.partial(_read_pass, stream, epoch * (batches + 1)) for stream in streams
        ]
        return skip_batches(mix_rows(sources, weights, batches, size, [seed, epoch]), batch)

    return read


def _read_pass(stream: StreamConfig, first: int, number: int) -> Iterator[Rows]:
    return read_epoch(stream, first + number)


def _build_mix_streams(
    source: Source, columns: Sequence[Column], seed: int
) -> Iterator[StreamConfig]:
    names = [column.name for column in columns]
    for version_dir, manifest in find_mixed(source.config, source.manifest, names):
        other = replace(source, version_dir=version_dir, manifest=manifest)
        theirs = [
            replace(column, is_sequence=found.is_sequence)
            for column, found in zip(
                columns, plan_columns(manifest, select_features(manifest, names)), strict=True
            )
        ]
        yield build_stream(other, theirs, seed)
