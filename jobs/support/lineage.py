"""OpenLineage events of the runs of commands: what came from what.

Off unless the client's own settings name a transport (openlineage.io/docs/client/python): an
`openlineage.yml`, or variables that begin with `OPENLINEAGE_`. An event that cannot be sent is a
warning: a catalogue that is down ends no build.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import UUID

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

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import Job, Run, RunEvent

_log = logging.getLogger("sluice.jobs.lineage")
_SETTINGS = ("OPENLINEAGE_CONFIG", "OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT")
_FILE = "openlineage.yml"
_SECONDS = 10.0
"""For an event, whatever the client's own time-outs and further tries are."""
_PARENT = "OPENLINEAGE_PARENT_ID"
_VERSION_FOLDERS = ("versions", "runs")
# Of two names of one store, the one that the standard has.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "postgresql": "postgres"}


@dataclass(frozen=True)
class LineageDataset:
    """What a run read or wrote.

    Attributes:
        namespace: Where it is: `file`, `s3://bucket`, `postgres://host:5432`.
        name: Its name there.
        version: Its version; None: it has none.
        rows: Rows read or written, where they are known.
        size_bytes: Their size.
        files: In how many files they are.
        columns: Type by column; empty: not known.
    """

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
        base, _, kind = str(place).rpartition("/")[0].rpartition("/")
        if kind not in _VERSION_FOLDERS:
            return cls.at(place, **facts)
        return cls.at(base, version=str(place).rpartition("/")[2], **facts)


@dataclass
class LineageRun:
    """What a command says of its run while it goes on.

    Attributes:
        inputs: What it read.
        outputs: What it wrote.
    """

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
    emitter = _build_emitter(job, dates)
    if emitter is None:
        yield told
        return
    emitter.emit("START", told)
    try:
        yield told
    except BaseException as error:
        stopped = isinstance(error, TrainingInterruptedError) or was_interrupted(error)
        emitter.emit("ABORT" if stopped else "FAIL", told, error)
        raise
    emitter.emit("COMPLETE", told)


def is_switched_on() -> bool:
    """Whether the client's settings name a transport."""
    if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    files = (Path.cwd() / _FILE, Path("~/.openlineage").expanduser() / _FILE)
    named = any(name.startswith(_SETTINGS) and value for name, value in os.environ.items())
    return named or any(file.is_file() for file in files)


def _build_emitter(job: str, dates: DateRange | None) -> _Emitter | None:
    if not is_switched_on():
        return None
    try:
        from openlineage.client import OpenLineageClient, set_producer
        from openlineage.client.uuid import generate_new_uuid
    except ModuleNotFoundError:
        hint = install_hint("lineage")
        _log.warning("OpenLineage has settings, but its client is not installed: %s", hint)
        return None
    set_producer(f"pkg:generic/{DISTRIBUTION}@{read_code_version()}")
    try:
        return _Emitter(OpenLineageClient(), job, str(generate_new_uuid()), dates)
    except Exception as error:  # Settings are the user's, and transports anybody's.
        _log.warning("no lineage events: OpenLineage's settings are refused: %s", error)
        return None


class _Emitter:
    def __init__(
        self, client: OpenLineageClient, job: str, run_id: str, dates: DateRange | None
    ) -> None:
        self._client, self._job, self._run_id, self._dates = client, job, run_id, dates
        self._namespace = os.environ.get("OPENLINEAGE_NAMESPACE") or "default"

    def emit(self, state: str, told: LineageRun, error: BaseException | None = None) -> None:
        """Sends an event; one that cannot be sent is a warning."""
        try:
            event = self._build_event(state, told, error)
            call_within(_SECONDS, lambda: self._client.emit(event))
        except Exception as failure:  # Transports raise what they like.
            _log.warning("the lineage event %s of %s was not sent: %s", state, self._job, failure)

    def _build_event(self, state: str, told: LineageRun, error: BaseException | None) -> RunEvent:
        from openlineage.client.event_v2 import RunEvent, RunState

        return RunEvent(
            eventType=RunState[state],
            eventTime=datetime.now(UTC).isoformat(),
            run=self._describe_run(error),
            job=self._describe_job(),
            inputs=[_describe(dataset, is_input=True) for dataset in told.inputs],
            outputs=[_describe(dataset, is_input=False) for dataset in told.outputs],
        )

    def _describe_job(self) -> Job:
        from openlineage.client.event_v2 import Job
        from openlineage.client.facet_v2 import job_type_job

        kind = job_type_job.JobTypeJobFacet("BATCH", "SLUICE", "JOB")
        return Job(self._namespace, self._job, {"jobType": kind})

    def _describe_run(self, error: BaseException | None) -> Run:
        from openlineage.client.event_v2 import Run
        from openlineage.client.facet_v2 import (
            error_message_run,
            nominal_time_run,
            processing_engine_run,
        )

        facets: dict[str, Any] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
                read_code_version(), "Sluice"
            )
        }
        if self._dates is not None:
            start, end = self._dates.first, self._dates.last + timedelta(days=1)
            times = (f"{day}T00:00:00Z" for day in (start, end))
            facets["nominalTime"] = nominal_time_run.NominalTimeRunFacet(*times)
        if error is not None:
            said = error.render() if isinstance(error, SluiceError) else repr(error)
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(said, "PYTHON")
        parent = _find_parent()
        return Run(self._run_id, facets | ({} if parent is None else {"parent": parent}))


def _find_parent() -> Any:
    """The run of a scheduler that started this one: `namespace/job/run id`."""
    from openlineage.client.facet_v2 import parent_run

    given = os.environ.get(_PARENT)
    if not given:
        return None
    try:
        namespace, job, run_id = given.rsplit("/", 2)
        UUID(run_id)
    except ValueError:
        _log.warning("%s is not `namespace/job/run id`: %s", _PARENT, given)
        return None
    return parent_run.ParentRunFacet(parent_run.Run(run_id), parent_run.Job(namespace, job))


def _describe(dataset: LineageDataset, *, is_input: bool) -> Any:
    from openlineage.client.event_v2 import InputDataset, OutputDataset
    from openlineage.client.facet_v2 import (
        dataset_version_dataset,
        input_statistics_input_dataset,
        output_statistics_output_dataset,
        schema_dataset,
    )

    named: dict[str, Any] = {"namespace": dataset.namespace, "name": dataset.name}
    facets: dict[str, Any] = {}
    if dataset.version is not None:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(dataset.version)
    if dataset.columns:
        fields = [
            schema_dataset.SchemaDatasetFacetFields(name, kind)
            for name, kind in dataset.columns.items()
        ]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(fields)
    counts = (dataset.rows, dataset.size_bytes, dataset.files)
    has_counts = any(count is not None for count in counts)
    if is_input:
        read = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(*counts)
        of_read: dict[str, Any] = {"inputStatistics": read} if has_counts else {}
        return InputDataset(**named, facets=facets, inputFacets=of_read)
    written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(*counts)
    of_written: dict[str, Any] = {"outputStatistics": written} if has_counts else {}
    return OutputDataset(**named, facets=facets, outputFacets=of_written)
