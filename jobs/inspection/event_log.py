"""Stages of a Spark application, as its event log tells of them.

A log is one file, or a folder `eventlog_v2_…` of several (`spark.eventLog.rolling.enabled`): an
event per line, in JSON. Layout: Spark's `EventLogFileWriters`; fields: its `JsonProtocol`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError

_ROLLED = "eventlog_v2_"
_FILE_NUMBER = re.compile(r"events_(\d+)_")
_FIRST_BYTES = (b'{"Event":', b"\x28\xb5\x2f\xfd", b"LZ4Block")  # plain, zstd, Spark's lz4
_UNREAD_CODECS = (".lz4", ".lzf", ".snappy")  # Java's own framings, not those of the formats
_BLOCK_BYTES = 4096  # what is lost at most where a compressed log breaks off
_EVENTS = ("JobStart", "StageSubmitted", "StageCompleted", "TaskEnd", "ApplicationEnd")
_EVENT = re.compile(rf'\{{"Event":"SparkListener({"|".join(_EVENTS)})"')
_DESCRIPTION = "spark.job.description"
# Metrics of a task that are summed: where they stand.
_READ, _WRITTEN = "Shuffle Read Metrics", "Shuffle Write Metrics"
_SUMS = {
    "rows_read": (("Input Metrics", "Records Read"), (_READ, "Total Records Read")),
    "bytes_read": (
        ("Input Metrics", "Bytes Read"), (_READ, "Local Bytes Read"), (_READ, "Remote Bytes Read"),
    ),
    "rows_written": (("Output Metrics", "Records Written"), (_WRITTEN, "Shuffle Records Written")),
    "bytes_written": (("Output Metrics", "Bytes Written"), (_WRITTEN, "Shuffle Bytes Written")),
}  # fmt: skip
_SPILLED = ("Memory", "Disk")


@dataclass
class _Stage:
    """What the events say of one attempt of a stage; times in milliseconds."""

    info: Mapping[str, Any] = field(default_factory=dict)
    seconds_by_task: list[float] = field(default_factory=list)
    failed: int = 0
    sums: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


def is_event_log(path: Path) -> bool:
    """Whether a path is an event log, or a folder of them."""
    if path.is_dir():
        return path.name.startswith(_ROLLED) or any(path.glob(f"{_ROLLED}*"))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(16).startswith(_FIRST_BYTES)


def find_event_log(directory: Path, application: str = "") -> Path:
    """Finds the newest log of an application, or of any.

    Args:
        directory: Where Spark writes logs (`spark.eventLog.dir`), or a log.
        application: Spark's id of it.

    Raises:
        UpstreamNotReadyError: There is none.
    """
    if directory.is_file() or directory.name.startswith(_ROLLED):
        return directory
    pattern = f"*{application}*" if application else f"{_ROLLED}*"
    found = list(directory.glob(pattern))
    if not found:
        raise UpstreamNotReadyError(
            "there is no event log of this application",
            received=directory / pattern,
            allowed="the folder that spark.eventLog.dir named when it ran",
            fix="correct the path, or build again with --set spark.event_log=DIR",
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


@dataclass
class _Application:
    """What has been read of a log: stages by number and attempt, descriptions of their jobs."""

    stages: defaultdict[tuple[int, int], _Stage] = field(
        default_factory=lambda: defaultdict(_Stage)
    )
    descriptions: dict[int, str] = field(default_factory=dict)
    has_ended: bool = False

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event["Event"].removeprefix("SparkListener")
        if kind == "JobStart":
            description = (event.get("Properties") or {}).get(_DESCRIPTION, "")
            self.descriptions.update(dict.fromkeys(event["Stage IDs"], description))
        elif kind == "TaskEnd":
            _add_task(self.stages[event["Stage ID"], event["Stage Attempt ID"]], event)
        elif kind == "ApplicationEnd":
            self.has_ended = True
        else:
            info = event["Stage Info"]
            self.stages[info["Stage ID"], info["Stage Attempt ID"]].info = info


def summarize_event_log(log: Path) -> dict[str, Any]:
    """Returns the stages of an application, with `problem` where the log breaks off.

    Raises:
        ConfigError: It is compressed in a way that is not read.
        InputDataError: It has no event of a stage, or one that is not as Spark writes it.
    """
    application, problems = _Application(), list[str]()
    for event in _read_events(log, problems):
        try:
            application.add(event)
        except (AttributeError, KeyError, TypeError) as error:
            raise InputDataError(
                "an event of this log is not as Spark writes it",
                received=f"{log}: {event['Event']}, {error!r}",
                allowed="event logs of Spark 3 and 4",
            ) from error
    if not application.stages:
        raise InputDataError(
            "this event log has no stage",
            received="; ".join([str(log), *problems]),
            allowed="the event log of an application that ran a job",
        )
    if not application.has_ended and not problems:
        problems = ["the application has not ended, or was killed"]
    stages, of = application.stages, application.descriptions
    return {
        "kind": "event_log",
        "path": str(log),
        "problem": "; ".join(problems) or None,
        "stages": [_describe(*key, stages[key], of.get(key[0])) for key in sorted(stages)],
    }


def _add_task(stage: _Stage, event: Mapping[str, Any]) -> None:
    info, metrics = event["Task Info"], event.get("Task Metrics") or {}
    if info["Failed"] or info.get("Killed"):
        stage.failed += 1
        return
    stage.seconds_by_task.append((info["Finish Time"] - info["Launch Time"]) / 1000)
    for name, places in _SUMS.items():
        found = (metrics.get(group) or {} for group, _ in places)
        stage.sums[name] += sum(
            values.get(key) or 0 for values, (_, key) in zip(found, places, strict=True)
        )
    for name in _SPILLED:
        stage.sums[f"spilled_{name.lower()}"] += metrics.get(f"{name} Bytes Spilled") or 0


def _describe(number: int, attempt: int, stage: _Stage, job: str | None) -> dict[str, Any]:
    times, info = stage.seconds_by_task, stage.info
    middle = median(times) if times else 0.0
    start, end = info.get("Submission Time"), info.get("Completion Time")
    return {
        "stage": number if attempt == 0 else f"{number}.{attempt}",
        "of": job or str(info.get("Stage Name", "")).partition(" at ")[0],
        "state": "failed" if "Failure Reason" in info else None if end else "unfinished",
        "tasks": len(times),
        "failed_tasks": stage.failed or None,
        "seconds": None if start is None or end is None else (end - start) / 1000,
        "task_seconds": round(sum(times), 3),
        "skew": round(max(times) / middle, 2) if len(times) > 1 and middle else None,
        **{name: value or None for name, value in stage.sums.items()},
    }


def _read_events(log: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the events of stages and tasks; what is wrong with the log goes into `problems`."""
    for file in _list_files(log):
        try:
            with _open(file) as stream:
                for line in _split_lines(stream):
                    if _EVENT.match(line):
                        yield json.loads(line)
        except (ValueError, OSError) as error:
            problems.append(f"{file.name} breaks off ({error}): what follows is not counted")
            return


def _list_files(log: Path) -> Iterable[Path]:
    if log.is_file():
        return [log]
    numbered = {path: _FILE_NUMBER.match(path.name) for path in log.iterdir()}
    return sorted((p for p, n in numbered.items() if n), key=lambda p: int(numbered[p][1]))  # type: ignore[index]


def _open(file: Path) -> IO[bytes]:
    suffixes = set(file.name.split(".")[1:])
    if unread := [codec for codec in _UNREAD_CODECS if codec[1:] in suffixes]:
        raise ConfigError(
            f"an event log that is compressed by {unread[0][1:]} is not read",
            received=file,
            allowed="logs that are not compressed, and zstd, which is Spark's default",
            fix="set spark.eventLog.compression.codec=zstd for the next build",
        )
    if "zstd" in suffixes:
        return pa.CompressedInputStream(pa.OSFile(str(file)), "zstd")
    return file.open("rb")


def _split_lines(stream: IO[bytes]) -> Iterator[str]:
    parts: list[bytes] = []  # of a line that is not whole yet: those of plans are megabytes
    while block := stream.read(_BLOCK_BYTES):
        if b"\n" not in block:
            parts.append(block)
            continue
        *lines, rest = b"".join([*parts, block]).split(b"\n")
        yield from (line.decode() for line in lines)
        parts = [rest]
    if any(parts):
        raise ValueError("its last line is not whole")
