"""Options of a write through the Spark data source, and what both directions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

COMMON_OPTIONS = ("path", "recordType", "compression", "codec")
_WRITE_OPTIONS = (
    *COMMON_OPTIONS, "deterministicNames", "encoders", "statistics", "writeLocality"
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


def check_names(options: Mapping[str, str], allowed: tuple[str, ...]) -> dict[str, str]:
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


def parse_choice(options: Mapping[str, str], name: str, choices: Mapping[str, object]) -> object:
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


def parse_flag(options: Mapping[str, str], name: str) -> bool:
    """Value of an option that is true or false; false where it is not given."""
    if name.lower() not in options:
        return False
    return bool(parse_choice(options, name, {"true": True, "false": False}))


def parse_record_type(options: Mapping[str, str]) -> RecordType:
    """Record type; `Example` where it is not given."""
    if "recordtype" not in options:
        return "Example"
    value = parse_choice(options, "recordType", {name: name for name in RECORD_TYPES})
    return value  # type: ignore[return-value]


def parse_compression(options: Mapping[str, str]) -> Compression | None:
    """Compression by either of its two option names; none where neither is given."""
    given = [name for name in ("compression", "codec") if name in options]
    values = {parse_choice(options, name, _COMPRESSIONS) for name in given}
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
    given = check_names(options, _WRITE_OPTIONS)
    if "writelocality" in given:
        parse_choice(given, "writeLocality", {"distributed": True})
    deterministic_names = parse_flag(given, "deterministicNames")
    if deterministic_names and not overwrite:
        raise ConfigError(
            "option deterministicNames would let an append replace earlier shards",
            received="save mode append",
            fix="use mode('overwrite'), or leave deterministicNames out",
        )
    encoders = given.get("encoders")
    return WriteOptions(
        directory=resolve_local_path(given.get("path", "")),
        record_type=parse_record_type(given),
        compression=parse_compression(given),
        deterministic_names=deterministic_names,
        encoders=None if encoders is None else resolve_local_path(encoders),
        statistics=parse_flag(given, "statistics"),
    )
