"""Converts files: one stream of batches from the sources to the sink."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.dataset import sync_directory
from conf.errors import ConfigError
from etl.conversion.formats import ConvertOptions, Format
from etl.conversion.sinks import open_sink
from etl.conversion.sources import open_stream


def convert_files(
    files: Sequence[Path],
    source: Format,
    output: Path,
    target: Format,
    options: ConvertOptions,
    on_rows: Callable[[int], None] = lambda _: None,
) -> int:
    """Converts files to one file, which appears whole or not at all.

    Args:
        files: Input files, of one format.
        source: Their format.
        output: File to create or replace; its directory must exist.
        target: Its format.
        options: How to read and write.
        on_rows: Told of each batch's rows.

    Returns:
        Rows written.

    Raises:
        ConfigError: The columns do not fit the target, or the output is one of the inputs.
        InputDataError: A file is malformed, or a value has no place in the target.
    """
    if any(output.exists() and file.samefile(output) for file in files):
        raise ConfigError("the output is one of the inputs", received=output)
    stream = open_stream(files, source, options)
    # Keeps the endings, by which writers choose compression and separator.
    temporary = output.with_name(f".{uuid.uuid4().hex}.{output.name}")
    rows = 0
    try:
        sink = open_sink(temporary, target, stream.schema, options)
        try:
            for batch in stream.batches:
                sink.write(batch)
                rows += batch.num_rows
                on_rows(batch.num_rows)
        except BaseException:
            sink.abort()
            raise
        sink.close()
        temporary.replace(output)
        sync_directory(output.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return rows
