"""What a directory of TFRecord files holds, whoever wrote them: one pass over every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import InputDataError
from etl.tfrecord.committed import Committed, read_committed
from etl.tfrecord.framing import HEADER_BYTES, RecordBlock, detect_compression, read_record_blocks
from etl.tfrecord.infer import FeatureSurvey
from jobs.inspection.sizes import RecordSizes
from jobs.inspection.slots import list_packed_columns
from jobs.inspection.verify import Problem, Progress, Verification, read_checksum

BYTE_ARRAY = "ByteArray"


def list_record_files(directory: Path) -> list[Path]:
    """Lists the data files below a directory; names that begin with `.` or `_` are left out."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(directory).parts)
    )


@dataclass
class _Survey:
    """What has been seen so far."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    compressions: set[str] = field(default_factory=set)
    sizes: RecordSizes = field(default_factory=RecordSizes)
    features: FeatureSurvey | None = None
    is_raw: bool = False
    problems: list[Problem] = field(default_factory=list)

    def update(self, block: RecordBlock, name: str) -> None:
        """Adds a block; the first one decides whether the payloads are Examples at all."""
        self.rows += len(block.index)
        self.sizes.update(block.index[:, 1])
        if self.is_raw:
            return
        first = self.features is None
        # Every Example reads as a SequenceExample without feature lists.
        survey = self.features or FeatureSurvey("SequenceExample")
        try:
            survey.update(block, name)
        except InputDataError:
            if not first:
                raise
            self.is_raw = True
            return
        self.features = survey

    @property
    def record_type(self) -> str:
        """What the payloads look like."""
        if self.is_raw or self.features is None:
            return BYTE_ARRAY
        sequences = any(feature.is_sequence for feature in self.features.features())
        return "SequenceExample" if sequences else "Example"


def summarize_files(
    directory: Path, progress: Progress = lambda _: None
) -> tuple[dict[str, Any], Verification]:
    """Reads every file below a directory.

    Args:
        directory: Where the files lie, in partition directories or not.
        progress: Told of the bytes read.

    Returns:
        What the files hold, as JSON values, and what is wrong with them: damage, and differences
        from the directory's own manifest where there is one.
    """
    committed = read_committed(directory)
    survey = _Survey()
    files = list_record_files(directory)
    for path in files:
        _survey_file(path, directory, survey, progress)
    known: set[str] = set()
    if committed is not None:
        known = {shard.path for shard in committed.shards}
        survey.problems += _compare(directory, committed)
    names = {str(path.relative_to(directory)) for path in files}
    features = [] if survey.features is None or survey.is_raw else survey.features.features()
    summary = {
        "kind": "files",
        "path": str(directory),
        "manifest": committed is not None,
        "not_in_manifest": sorted(names - known) if committed is not None else [],
        "files": survey.files,
        "rows": survey.rows,
        "bytes": survey.bytes,
        "record_type": survey.record_type,
        "compressions": sorted(survey.compressions),
        "partition_columns": [] if committed is None else list(committed.partition_columns),
        "record_sizes": survey.sizes.to_json(),
        "packed_columns": [column.to_json() for column in list_packed_columns(committed)],
        "features": [
            {
                "name": feature.name,
                "dtype": feature.kind,
                "shape": [None, None] if feature.is_sequence else [None] if feature.is_list else [],
            }
            for feature in features
        ],
    }
    return summary, Verification(survey.files, survey.rows, survey.bytes, tuple(survey.problems))


def _survey_file(path: Path, root: Path, survey: _Survey, progress: Callable[[int], None]) -> None:
    relative, size = str(path.relative_to(root)), path.stat().st_size
    with path.open("rb") as file:
        compression = detect_compression(file.read(HEADER_BYTES))
    survey.files += 1
    survey.bytes += size
    survey.compressions.add(compression or "none")
    done = 0
    try:
        for block in read_record_blocks(path, compression=compression):
            survey.update(block, str(path))
            if compression is None:
                progress(block.data.size)
                done += block.data.size
    except InputDataError as error:
        survey.problems.append(Problem(relative, error.what.removeprefix(f"{path}: ")))
    progress(max(0, size - done))


def _compare(directory: Path, committed: Committed) -> list[Problem]:
    """Holds the files against the manifest that lies beside them."""
    problems = []
    for shard in committed.shards:
        path = directory / shard.path
        if not path.is_file():
            problems.append(Problem(shard.path, "is missing"))
        elif path.stat().st_size != shard.bytes:
            size = path.stat().st_size
            problems.append(
                Problem(shard.path, f"is {size:,} bytes long, the manifest says {shard.bytes:,}")
            )
        elif (found := read_checksum(path)) != shard.crc32c:
            problems.append(
                Problem(shard.path, f"CRC-32C is {found}, the manifest says {shard.crc32c}")
            )
    return problems
