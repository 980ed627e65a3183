"""Options of the Spark data source: names, values, and what the JVM connectors call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conf.errors import ConfigError, did_you_mean
from etl.tfrecord.encode import RECORD_TYPES, RecordType
from etl.tfrecord.framing import Compression

_COMPRESSIONS: Mapping[str, Compression | None] = {
    "none": None,
    "uncompressed": None,
    "": None,
    "gzip": "GZIP",
    "zlib": "ZLIB",
    "deflate": "ZLIB",
    "org.apache.hadoop.io.compress.gzipcodec": "GZIP",
    "org.apache.hadoop.io.compress.defaultcodec": "ZLIB",
    "org.apache.hadoop.io.compress.deflatecodec": "ZLIB",
}
# What Hadoop's codecs are recognised by, so that the JVM connectors read these files too.
_SUFFIXES: Mapping[Compression | None, str] = {None: "", "GZIP": ".gz", "ZLIB": ".deflate"}

_COMMON_OPTIONS = ("path", "recordType", "compression", "codec")
_WRITE_OPTIONS = (
    *_COMMON_OPTIONS, "deterministicNames", "encoders", "statistics", "writeLocality"
)  # fmt: skip


@dataclass(frozen=True)
class WriteOptions:
    """Resolved options of a write.

    Attributes:
        directory: Absolute local output directory.
        record_type: Record type of the shards.
        compression: Compression of the shards.
        deterministic_names: Whether shards are named by partition alone.
        encoders: Directory of fitted encoders to apply before encoding, or None.
        statistics: Whether statistics of the written features are collected.
    """

    directory: str
    record_type: RecordType
    compression: Compression | None
    deterministic_names: bool
    encoders: str | None
    statistics: bool

    @property
    def suffix(self) -> str:
        """Ending of the shards' names."""
        return f".tfrecord{_SUFFIXES[self.compression]}"


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


def resolve_local_path(path: str) -> str:
    """Turns a plain path or a `file:` URI into an absolute local path.

    Args:
        path: As the user gave it.

    Raises:
        ConfigError: Another scheme, or a `file:` URI that names a host.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", path)
    local = path
    if scheme is not None and scheme[1].lower() == "file":
        local = re.sub(r"^file:(//(localhost)?(?=/))?", "", path, flags=re.IGNORECASE)
    if not path or (scheme is not None and local == path) or local.startswith("//"):
        raise ConfigError(
            "TFRecord paths are local for now",
            received=path or "no path",
            allowed="a path such as /data/train, or file:///data/train",
            fix="write to a file system that driver and executors share as a mount",
        )
    return str(Path(local).absolute())


def _check_names(options: Mapping[str, str], allowed: tuple[str, ...]) -> dict[str, str]:
    """Options by lower-case name, which is how Spark hands them over."""
    known = {name.lower() for name in allowed}
    unknown = [name for name in options if name.lower() not in known]
    if unknown:
        raise ConfigError(
            f"unknown TFRecord option {unknown[0]!r}",
            received=", ".join(sorted(unknown)),
            allowed=", ".join(name for name in allowed if name != "path"),
            fix=did_you_mean(unknown[0], allowed),
        )
    return {name.lower(): value for name, value in options.items()}


def _parse_choice(options: Mapping[str, str], name: str, choices: Mapping[str, object]) -> object:
    """Value of an option whose spelling in upper or lower case does not matter."""
    value = options[name.lower()]
    for choice, meaning in choices.items():
        if choice.lower() == value.lower():
            return meaning
    raise ConfigError(
        f"bad value of TFRecord option {name!r}",
        received=repr(value),
        allowed=", ".join(choice for choice in choices if choice),
        fix=did_you_mean(value, choices),
    )


def _parse_flag(options: Mapping[str, str], name: str) -> bool:
    if name.lower() not in options:
        return False
    return bool(_parse_choice(options, name, {"true": True, "false": False}))


def _parse_record_type(options: Mapping[str, str]) -> RecordType:
    if "recordtype" not in options:
        return "Example"
    value = _parse_choice(options, "recordType", {name: name for name in RECORD_TYPES})
    return value  # type: ignore[return-value]


def _parse_compression(options: Mapping[str, str]) -> Compression | None:
    given = [name for name in ("compression", "codec") if name in options]
    values = {_parse_choice(options, name, _COMPRESSIONS) for name in given}
    if len(values) > 1:
        raise ConfigError(
            "TFRecord options 'compression' and 'codec' contradict each other",
            received=", ".join(f"{name}={options[name]}" for name in given),
            fix="give one of them",
        )
    return values.pop() if values else None  # type: ignore[return-value]


def parse_write_options(options: Mapping[str, str], overwrite: bool) -> WriteOptions:
    """Checks the options of a write.

    Args:
        options: As Spark hands them over; names in any case.
        overwrite: Whether the save mode is overwrite.

    Raises:
        ConfigError: Unknown option, bad value, or options that exclude each other.
    """
    given = _check_names(options, _WRITE_OPTIONS)
    if "writelocality" in given:
        _parse_choice(given, "writeLocality", {"distributed": True})
    deterministic_names = _parse_flag(given, "deterministicNames")
    if deterministic_names and not overwrite:
        raise ConfigError(
            "option deterministicNames would let an append replace earlier shards",
            received="save mode append",
            fix="use mode('overwrite'), or leave deterministicNames out",
        )
    encoders = given.get("encoders")
    return WriteOptions(
        directory=resolve_local_path(given.get("path", "")),
        record_type=_parse_record_type(given),
        compression=_parse_compression(given),
        deterministic_names=deterministic_names,
        encoders=None if encoders is None else resolve_local_path(encoders),
        statistics=_parse_flag(given, "statistics"),
    )


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Checks the options of a read.

    Args:
        options: As Spark hands them over; names in any case.

    Raises:
        ConfigError: Unknown option or bad value.
    """
    given = _check_names(options, _COMMON_OPTIONS)
    stated = "compression" in given or "codec" in given
    return ReadOptions(
        path=resolve_local_path(given.get("path", "")),
        record_type=_parse_record_type(given),
        compression=_parse_compression(given) if stated else "auto",
    )
