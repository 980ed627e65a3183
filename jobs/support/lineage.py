"""OpenLineage events of the runs of commands: what came from what.

Off unless the client's own settings name a transport (openlineage.io/docs/client/python). An event
that cannot be sent is a warning: a catalogue that is down ends no build.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from conf import errors
from conf.deadline import call_within

_log = logging.getLogger("sluice.jobs.lineage")
_SECONDS = 10.0  # For an event, whatever the client's own time-outs and further tries are.
# Of two names of one store, the one that the standard has.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "postgresql": "postgres"}


@dataclass(frozen=True)
class LineageDataset:
    """What a run read or wrote: the standard's name of it, and what is known of it."""

    namespace: str
    name: str
    version: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    statistics: Sequence[int | None] = ()  # Rows, bytes, files.

    @classmethod
    def at(cls, place: str | Path, **facts: Any) -> LineageDataset:
        """Names a path or a URI; of `…/versions/7` and `…/runs/7` the end is the version."""
        one = re.fullmatch(r"(.+)/(?:versions|runs)/([^/]+)", str(place))
        if one and "version" not in facts:
            return cls.at(one[1], version=one[2], **facts)
        parts = urlsplit(str(place))
        if parts.scheme in ("", "file"):
            return cls("file", str(Path(parts.path).absolute()), **facts)
        scheme = _SCHEMES.get(parts.scheme, parts.scheme)
        # Keys of a store begin without a slash, paths of a file system with one.
        path = parts.path if scheme == "hdfs" else parts.path.strip("/")
        return cls(f"{scheme}://{parts.netloc}", path, **facts)

    def describe(self, side: str) -> dict[str, Any]:
        """Returns it as the client takes an `input` or an `output`."""
        from openlineage.client import facet_v2 as kinds

        facets: dict[str, Any] = {}
        if self.version is not None:
            version = kinds.dataset_version_dataset.DatasetVersionDatasetFacet(self.version)
            facets["version"] = version
        if self.columns:
            column = kinds.schema_dataset.SchemaDatasetFacetFields
            fields = [column(*found) for found in self.columns.items()]
            facets["schema"] = kinds.schema_dataset.SchemaDatasetFacet(fields)
        statistics = {
            "input": kinds.input_statistics_input_dataset.InputStatisticsInputDatasetFacet,
            "output": kinds.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
        }[side](*self.statistics)
        of_side = {f"{side}Facets": {f"{side}Statistics": statistics}}
        return {"namespace": self.namespace, "name": self.name, "facets": facets, **of_side}


@dataclass
class LineageRun:
    """Emits START before the block, and after it COMPLETE, FAIL or ABORT (by a signal)."""

    job: str
    inputs: Sequence[LineageDataset] = ()  # The block says what it reads and writes.
    outputs: Sequence[LineageDataset] = ()
    run_id: str = field(default_factory=lambda: str(uuid4()))

    def __enter__(self) -> LineageRun:
        self._emit("START")
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        is_stopped = isinstance(error, errors.TrainingInterruptedError)
        state = "ABORT" if is_stopped or (error and errors.was_interrupted(error)) else "FAIL"
        self._emit(state if error else "COMPLETE", error)

    def _emit(self, state: str, error: BaseException | None = None) -> None:
        try:
            if is_switched_on():
                call_within(_SECONDS, lambda: self._send(state, error))
        except Exception as failure:  # Settings are the user's, and transports anybody's.
            is_missing = isinstance(failure, ModuleNotFoundError)
            why = f"{failure}; {errors.install_hint('lineage')}" if is_missing else failure
            _log.warning("the lineage event %s of %s was not sent: %s", state, self.job, why)

    def _send(self, state: str, error: BaseException | None) -> None:
        from openlineage.client import OpenLineageClient, event_v2, set_producer
        from openlineage.client.facet_v2 import error_message_run, parent_run

        facets: dict[str, Any] = {}
        if error is not None:
            said = error.render() if isinstance(error, errors.SluiceError) else repr(error)
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(said, "PYTHON")
        if parent := os.environ.get("OPENLINEAGE_PARENT_ID"):  # Of a scheduler's.
            namespace, name, run_id = parent.rsplit("/", 2)
            run, job = parent_run.Run(run_id), parent_run.Job(namespace, name)
            facets["parent"] = parent_run.ParentRunFacet(run, job)
        set_producer(f"pkg:generic/{errors.DISTRIBUTION}@{errors.read_code_version()}")
        event = event_v2.RunEvent(
            eventType=event_v2.RunState[state],
            eventTime=datetime.now(UTC).isoformat(),
            run=event_v2.Run(self.run_id, facets),
            job=event_v2.Job(os.environ.get("OPENLINEAGE_NAMESPACE") or "default", self.job),
            inputs=[event_v2.InputDataset(**read.describe("input")) for read in self.inputs],
            outputs=[event_v2.OutputDataset(**made.describe("output")) for made in self.outputs],
        )
        OpenLineageClient().emit(event)


def is_switched_on() -> bool:
    """Whether the client's settings name a transport."""
    files = (Path("openlineage.yml"), Path("~/.openlineage/openlineage.yml").expanduser())
    settings = ("OPENLINEAGE_CONFIG", "OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT")
    named = any(name.startswith(settings) and value for name, value in os.environ.items())
    return named or any(file.is_file() for file in files)
