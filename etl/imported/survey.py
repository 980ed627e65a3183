"""The one pass over each file: verified, counted, and brought into the version."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.manifest import (
    InputFile,
    ShardInfo,
)
from conf.schema import PAD_ID
from conf.storage.locations import Compression
from etl.imported.features import ImportedFeatures
from etl.imported.ids import (
    TokenCounts,
    plan_moved_ids,
)
from etl.imported.records import RecordReader, count_padded_in_front
from etl.quality.statistics import (
    StatisticsAccumulator,
)
from etl.records.record_hooks import nest_lists, nest_schema
from etl.tfrecord.codec.crc32c import describe_file
from etl.tfrecord.codec.framing import HEADER_BYTES, detect_compression, read_record_blocks
from etl.tfrecord.codec.infer import count_feature_lists
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


@dataclass(frozen=True)
class Surveyed:
    """A file that was read through, and linked into the version."""

    info: ShardInfo
    statistics: dict[str, Any]
    compression: Compression | None


class Survey:
    """Reads files through, and brings them into the version.

    Args:
        features: How features lie in the records.
        staging: Directory of the version to be.

    Attributes:
        counts: How often ids that move occur in train records.
        keys: Counts users and items of train records.
        padded_in_front: How many lists of a feature begin with padding before their ids.
    """

    def __init__(self, features: ImportedFeatures, staging: Path) -> None:
        self.keys = features.build_counter()
        self.features, self.staging = features, staging
        self.padded_in_front: Counter[str] = Counter()
        self._moved = plan_moved_ids(features.config)
        self.counts = TokenCounts(features.config, [f.name for f in features.wire if f.is_list])

    def read(self, split: str, number: int, file: InputFile) -> Surveyed:
        """Reads a file, and links, copies or writes it anew."""
        source, config = Path(file.path), self.features.config
        reader, lists = RecordReader(self.features), self.features.feature_lists
        statistics = StatisticsAccumulator(reader.schema, self.features.focus)
        rows, with_lists = 0, 0
        target = self.staging / split / f"{number:05d}-{source.name}"
        target.parent.mkdir(exist_ok=True)
        compression = _read_compression(source)
        with contextlib.ExitStack() as stack:
            writer = None
            if config.writes_anew:
                options = ShardOptions(self.features.record_type, compression=compression)
                schema = nest_schema(reader.schema, lists)
                writer = stack.enter_context(TableWriter(target, schema, options))
            for block in read_record_blocks(file.path):
                batch = self._moved.apply(reader.read(block, file.path))
                for name in self.features.id_lists:
                    self.padded_in_front[name] += count_padded_in_front(batch.column(name), PAD_ID)
                statistics.update(batch)
                rows += batch.num_rows
                with_lists += count_feature_lists(block)
                if split == "train":
                    self.counts.update(batch)
                    self.keys.update(batch)
                if writer is not None:
                    writer.write(nest_lists(batch, lists))
            self.features.check_file(split, file.path, rows, with_lists)
        if not config.writes_anew:
            _bring(source, target, config.output.files)
        described = describe_file(self.staging, target)
        info = ShardInfo(described.path, rows, described.bytes, described.crc32c)
        return Surveyed(info, statistics.to_dict(), compression if rows else None)


def _read_compression(path: Path) -> Compression | None:
    with path.open("rb") as handle:
        return detect_compression(handle.read(HEADER_BYTES))


def _bring(source: Path, target: Path, how: str) -> None:
    if how == "copy":
        shutil.copyfile(source, target)
        with target.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        target.symlink_to(source)
