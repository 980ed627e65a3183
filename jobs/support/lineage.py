"""OpenLineage events of the runs of commands: what came from what.

Off unless the client's own settings name a transport (openlineage.io/docs/client/python): an
`openlineage.yml`, or variables that begin with `OPENLINEAGE_`. An event that cannot be sent is a
warning: a catalogue that is down ends no build.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conf.dates import DateRange
from conf.deadline import call_within
from conf.errors import (
    DISTRIBUTION,
    SluiceError,
    TrainingInterruptedError,
    install_hint,
    read_code_version,
    was_interrupted,
)

_log = logging.getLogger("sluice.jobs.lineage")
_SETTINGS = ("OPENLINEAGE_CONFIG", "OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT")
_SECONDS = 10.0
"""For an event, whatever the client's own time-outs and further tries are."""
# Of two names of one store, the one that the standard has.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "postgresql": "postgres"}


@dataclass(frozen=True)
class LineageDataset:
    """What a run read or wrote: the standard's name of it, and what is known of it."""

    namespace: str
    name: str
    version: str | None = None
    rows: int | None = None
    size_bytes: int | None = None
    files: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, place: str | Path, **facts: Any) -> LineageDataset:
        """A dataset at a path or a URI, named as the standard names files and objects."""
        parts = urlsplit(str(place))
        if parts.scheme in ("", "file"):
            return cls("file", str(Path(parts.path).absolute()), **facts)
        scheme = _SCHEMES.get(parts.scheme, parts.scheme)
        # Keys of a store begin without a slash, paths of a file system with one.
        path = parts.path if scheme == "hdfs" else parts.path.strip("/")
        return cls(f"{scheme}://{parts.netloc}", path, **facts)

    @classmethod
    def version_at(cls, place: str | Path, **facts: Any) -> LineageDataset:
        """What has versions, by the place of one (`…/versions/<id>`, `…/runs/<id>`) or of all."""
        above, _, name = str(place).rpartition("/")
        base, _, kind = above.rpartition("/")
        if kind not in ("versions", "runs"):
            return cls.at(place, **facts)
        return cls.at(base, version=name, **facts)


@dataclass
class LineageRun:
    """What a command says of its run while it goes on."""

    inputs: Sequence[LineageDataset] = ()
    outputs: Sequence[LineageDataset] = ()


@contextmanager
def emit_lineage(job: str, dates: DateRange | None = None) -> Iterator[LineageRun]:
    """Emits START before the block, and after it COMPLETE, FAIL or ABORT (by a signal).

    Args:
        job: Name of the job: command and name of what it makes, `build.ml_1m`.
        dates: Days that the run is of, or None.

    Yields:
        What the block says of its inputs and outputs once it knows them.
    """
    told = LineageRun()
    emit = _open_client(job, dates) if is_switched_on() else lambda *_: None
    emit("START", told)
    try:
        yield told
    except BaseException as error:
        stopped = isinstance(error, TrainingInterruptedError) or was_interrupted(error)
        emit("ABORT" if stopped else "FAIL", told, error)
        raise
    emit("COMPLETE", told)


def is_switched_on() -> bool:
    """Whether the client's settings name a transport."""
    if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    files = (Path("openlineage.yml"), Path("~/.openlineage/openlineage.yml").expanduser())
    named = any(name.startswith(_SETTINGS) and value for name, value in os.environ.items())
    return named or any(file.is_file() for file in files)


def _open_client(job: str, dates: DateRange | None) -> Callable[..., None]:
    """Returns what sends an event of a run; one that cannot be sent is a warning."""
    try:
        from openlineage.client import OpenLineageClient, set_producer
        from openlineage.client.uuid import generate_new_uuid

        set_producer(f"pkg:generic/{DISTRIBUTION}@{read_code_version()}")
        client, run_id = OpenLineageClient(), str(generate_new_uuid())
    except Exception as error:  # Settings are the user's, and transports anybody's.
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = install_hint("lineage") if is_missing else "its settings are refused"
        _log.warning("no lineage events: %s (%s)", error, hint)
        return lambda *_: None

    def emit(state: str, told: LineageRun, error: BaseException | None = None) -> None:
        try:
            event = _build_event((state, job, run_id), told, _describe_run(dates, error))
            call_within(_SECONDS, lambda: client.emit(event))
        except Exception as failure:  # Transports raise what they like.
            _log.warning("the lineage event %s of %s was not sent: %s", state, job, failure)

    return emit


def _describe_run(dates: DateRange | None, error: BaseException | None) -> dict[str, Any]:
    from openlineage.client import facet_v2

    facets: dict[str, Any] = {}
    if dates is not None:
        days = (dates.first, dates.last + timedelta(days=1))
        times = (f"{day}T00:00:00Z" for day in days)
        facets["nominalTime"] = facet_v2.nominal_time_run.NominalTimeRunFacet(*times)
    if error is not None:
        said = error.render() if isinstance(error, SluiceError) else repr(error)
        facets["errorMessage"] = facet_v2.error_message_run.ErrorMessageRunFacet(said, "PYTHON")
    if parent := os.environ.get("OPENLINEAGE_PARENT_ID"):  # Of a scheduler that started this one.
        namespace, name, run_id = parent.rsplit("/", 2)
        kinds = facet_v2.parent_run
        facets["parent"] = kinds.ParentRunFacet(kinds.Run(run_id), kinds.Job(namespace, name))
    return facets


def _build_event(about: tuple[str, str, str], told: LineageRun, facets: dict[str, Any]) -> Any:
    from openlineage.client import event_v2

    state, job, run_id = about
    return event_v2.RunEvent(
        eventType=event_v2.RunState[state],
        eventTime=datetime.now(UTC).isoformat(),
        run=event_v2.Run(run_id, facets),
        job=event_v2.Job(os.environ.get("OPENLINEAGE_NAMESPACE") or "default", job),
        inputs=[_describe(found, "input", event_v2.InputDataset) for found in told.inputs],
        outputs=[_describe(found, "output", event_v2.OutputDataset) for found in told.outputs],
    )


def _describe(dataset: LineageDataset, side: str, kind: Any) -> Any:
    from openlineage.client import facet_v2

    facets: dict[str, Any] = {}
    if dataset.version is not None:
        version = facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet(dataset.version)
        facets["version"] = version
    if dataset.columns:
        column = facet_v2.schema_dataset.SchemaDatasetFacetFields
        fields = [column(*found) for found in dataset.columns.items()]
        facets["schema"] = facet_v2.schema_dataset.SchemaDatasetFacet(fields)
    counts, of_side = (dataset.rows, dataset.size_bytes, dataset.files), {}
    if any(count is not None for count in counts):
        statistics = {
            "input": facet_v2.input_statistics_input_dataset.InputStatisticsInputDatasetFacet,
            "output": facet_v2.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
        }
        of_side[f"{side}Statistics"] = statistics[side](*counts)
    about = {"namespace": dataset.namespace, "name": dataset.name, "facets": facets}
    return kind(**about, **{f"{side}Facets": of_side})
