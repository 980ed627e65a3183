"""Records of what was measured at one size, with the commit, the machine and the command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("measured")


@dataclass(frozen=True)
class ScaleRecord:
    """What one part took at one size.

    Attributes:
        series: What was measured, in one shape: records of a series differ by their size alone.
        size: Of what the series counts: events, keys, workers, items, tokens.
        figures: By name, which ends with its unit.
        command: That measured it.
        commit: Of the code that was measured.
        processor: Of the machine.
        cores: Of the machine.
        load: Processes that wanted a core when it began; wall time counts only where it is small.
        measured_on: Day, as in 2026-11-26.
    """

    series: str
    size: int
    figures: Mapping[str, float]
    command: str
    commit: str
    processor: str
    cores: int
    load: float
    measured_on: str

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        return f"{self.series}-{self.size}"


Records = Mapping[str, tuple[ScaleRecord, ...]]
"""Records by series, each by rising size."""


def write_record(record: ScaleRecord, folder: Path = FOLDER) -> Path:
    """Writes a record beside the others, in place of one of its series and size."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{record.name}.json"
    file.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return file


def read_records(folder: Path = FOLDER) -> Records:
    """Reads all records."""
    files = sorted(folder.glob("*.json"))
    return group(ScaleRecord(**json.loads(file.read_text(encoding="utf-8"))) for file in files)


def group(records: Iterable[ScaleRecord]) -> Records:
    """Returns records by series, each by rising size."""
    found: dict[str, list[ScaleRecord]] = {}
    for record in sorted(records, key=lambda record: (record.series, record.size)):
        found.setdefault(record.series, []).append(record)
    return {series: tuple(ones) for series, ones in found.items()}
