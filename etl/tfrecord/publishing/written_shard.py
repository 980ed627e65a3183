"""What a task leaves behind, as the driver-side commit takes it; imports nothing compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conf.errors import ConfigError
from conf.manifest import ShardInfo


@dataclass(frozen=True)
class ShardLimits:
    """When a file is full.

    Attributes:
        rows: Records at most, or None for no limit.
        bytes: Bytes at most, as stored, or None; a record that is longer gets a file of its own.
    """

    rows: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses limits below 1.

        Raises:
            ConfigError: A limit is not positive.
        """
        for name, limit in (("rows", self.rows), ("bytes", self.bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"bad limit of {name} per shard", received=limit, allowed="1 or more, or none"
                )

    @property
    def is_none(self) -> bool:
        """Whether there is no limit at all."""
        return self.rows is None and self.bytes is None


@dataclass(frozen=True)
class WrittenShard:
    """A finished file.

    Attributes:
        info: Path relative to the root that it was written under, rows, bytes and checksum.
        split_offsets: Byte offsets at which records begin, see `ShardFile`.
        statistics: Statistics of its features, or None.
        has_index: Whether its side file was written.
    """

    info: ShardInfo
    split_offsets: tuple[int, ...]
    statistics: dict[str, Any] | None = None
    has_index: bool = False


@dataclass(frozen=True)
class TaskShard:
    """A file that a task left behind.

    Attributes:
        shard: The file; its path is relative to the task's directory.
        partition_values: Value by partition column, None for null.
    """

    shard: WrittenShard
    partition_values: dict[str, str | None] = field(default_factory=dict)
