"""The plan of a build: what it would read, make and write; as JSON, and as a page in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from conf.manifest import InputFile
from conf.splits import TRAIN, VALIDATION
from jobs.support.formatting import format_bytes

if TYPE_CHECKING:
    from etl.encoders.feature_plan import FeaturePlan
    from etl.versions.run_fingerprint import RunRequest

_WIDTH, _INDENT = 100, 14
_MOST_NAMES = 30


def plan(config: BuildConfig, request: RunRequest) -> dict[str, Any]:
    """Returns what a build would do, from the config and a look at the input files alone.

    Raises:
        ConfigError: The features do not fit the declared columns, or a split would be empty.
        InputDataError: A source file is missing or empty.
    """
    from conf.storage.locations import find_path
    from etl.events.splits import plan_spans, show_span

    dates = request.dates
    features, inputs = check_build(config, request)
    return {
        "config": config.resolved(),
        "dates": None if dates is None else [str(dates.first), str(dates.last)],
        "inputs": [
            {"source": file.source, "path": file.path, "bytes": file.bytes} for file in inputs
        ],
        "splits": {name: show_span(span) for name, span in plan_spans(config, dates).items()},
        "features": [feature.name for feature in features.features],
        "vocabularies": [vocabulary.name for vocabulary in features.vocabularies],
        "shards": _declare_shards(config),
        "output": str(find_path(config.output.root) / config.name),
    }


def _declare_shards(config: BuildConfig) -> dict[str, int | None]:
    """Shards by split; None: as many as rows or bytes make."""
    output = config.output
    by_size = output.shard_rows is not None or output.shard_bytes is not None
    train = None if by_size else output.shards
    return {
        split: train if split == TRAIN else output.eval_shards
        for split in config.record_splits
        if split != VALIDATION or config.split.has_validation
    }


def check_build(config: BuildConfig, request: RunRequest) -> tuple[FeaturePlan, list[InputFile]]:
    """Checks what can be checked without Spark: the config, then the files; returns what it found.

    Raises:
        ConfigError: The features do not fit the declared columns, a split would be empty, or there
            is no folder for sources.
        InputDataError: A file of a source or a vocabulary is missing, or a source is empty.
        UpstreamNotReadyError: A day of the run has no file yet, or, where days may be empty, all.
    """
    from etl.build import check_config

    features = check_config(config, request)
    return features, find_inputs(config, request.dates)


def find_inputs(config: BuildConfig, dates: DateRange | None) -> list[InputFile]:
    """Lists the input files of every source that is read; those of vocabularies must be there too.

    Raises:
        ConfigError: There is no folder for sources.
        InputDataError: A file of a source or a vocabulary is missing, or a source is empty.
        UpstreamNotReadyError: A day of the run has no file yet, or, where days may be empty, all.
    """
    from etl.sources.files import check_files, list_files
    from etl.sources.snapshot import find_token_files

    log = config.events.source
    inputs = [
        file
        for name, source in config.used_sources.items()
        for file in check_files(
            list_files(name, source, config.data_dir, dates), dates, is_log=name == log
        )
    ]
    list(find_token_files(config))
    return inputs


def list_lines(planned: Mapping[str, Any]) -> list[str]:
    """Returns a plan in words, on a page."""
    return [
        line
        for name, text in _list_parts(planned)
        for line in textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"{name:{_INDENT}}",
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]


def _list_parts(planned: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    dates = planned["dates"]
    yield "dataset", planned["output"]
    if dates is not None:
        yield "days", " to ".join(dict.fromkeys(dates))
    for name in planned["config"]["sources"]:
        files = [file for file in planned["inputs"] if file["source"] == name]
        if files:
            size = format_bytes(sum(file["bytes"] for file in files))
            yield "reads", f"{name}: {len(files):,} file{'s' * (len(files) > 1)}, {size}"
    strategy = planned["config"]["split"]["strategy"]
    bounds = "; ".join(_show_span(name, span) for name, span in planned["splits"].items())
    yield "split", f"{strategy}: {bounds}" if bounds else strategy
    yield "features", _show_names(planned["features"])
    if planned["vocabularies"]:
        yield "vocabularies", _show_names(planned["vocabularies"])
    shards = (f"{split} {n or 'by size'}" for split, n in planned["shards"].items())
    yield "writes", f"shards: {', '.join(shards)}"
    yield "", "--full prints the resolved config and every file, as JSON."


def _show_span(name: str, span: Sequence[str | None]) -> str:
    first, end = span
    return " ".join(filter(None, (name, first and f"from {first}", end and f"until {end}")))


def _show_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{len(names)}: {shown}" + (f" and {more} more" if more > 0 else "")
