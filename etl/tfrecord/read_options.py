"""Options of a read through the Spark data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from etl.tfrecord.encode import RecordType
from etl.tfrecord.framing import Compression
from etl.tfrecord.options import (
    COMMON_OPTIONS,
    check_names,
    parse_compression,
    parse_record_type,
    resolve_local_path,
)


@dataclass(frozen=True)
class ReadOptions:
    """Resolved options of a read.

    Attributes:
        path: Absolute local file, directory or glob pattern.
        record_type: Record type of the files.
        compression: `"auto"` tells each file's compression from its content.
    """

    path: str
    record_type: RecordType
    compression: Compression | Literal["auto"] | None


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checks the options of a read.

    Args:
        options: As Spark hands them over; names in any case.

    Raises:
        ConfigError: Unknown option or bad value.
    """
    given = check_names(options, COMMON_OPTIONS)
    stated = "compression" in given or "codec" in given
    return ReadOptions(
        path=resolve_local_path(given.get("path", "")),
        record_type=parse_record_type(given),
        compression=parse_compression(given) if stated else "auto",
    )
