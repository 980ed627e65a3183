"""OpenLineage events of the runs of commands: what came from what.

Off unless the client's own settings name a transport (openlineage.io/docs/client/python). An event
that cannot be sent is a warning: a catalogue that is down ends no build.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from conf import errors
from conf.deadline import call_within

_SETTINGS = ("OPENLINEAGE_CONFIG", "OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT")
_FILES = ("openlineage.yml", "~/.openlineage/openlineage.yml")
_SECONDS = 10.0  # For an event, whatever the client's own time-outs and further tries are.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "postgresql": "postgres"}  # As the standard names them.
# The end of a path may be a version of what is named before it.
_VERSIONED = re.compile(r"(.+)/(?:versions|runs)/([^/]+)|(.+/(?:export|delta)(?:/[^/]+)?)/([^/]+)")


@dataclass
class LineageRun:
    """Emits START before the block, and after it COMPLETE, FAIL or ABORT (by a signal)."""

    job: str
    inputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # Columns by place.
    outputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: str(uuid4()))

    def __enter__(self) -> LineageRun:
        self._emit("START")
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        is_stopped = isinstance(error, errors.TrainingInterruptedError)
        state = "ABORT" if is_stopped or (error and errors.was_interrupted(error)) else "FAIL"
        self._emit(state if error else "COMPLETE", error)

    def _emit(self, state: str, error: BaseException | None = None) -> None:
        named = any(name.startswith(_SETTINGS) and value for name, value in os.environ.items())
        if named or any(Path(file).expanduser().is_file() for file in _FILES):
            lost = f"the lineage event {state} of {self.job} was not sent by sluice-recsys[lineage]"
            warn = functools.partial(logging.getLogger("sluice.jobs").warning, "%s: %s", lost)
            call_within(_SECONDS, lambda: self._send(state, error), warn)

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
            inputs=[event_v2.InputDataset(**describe(*read)) for read in self.inputs.items()],
            outputs=[event_v2.OutputDataset(**describe(*made)) for made in self.outputs.items()],
        )
        OpenLineageClient().emit(event)


def describe(place: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns a dataset as the standard names it: namespace, name, version and columns."""
    from openlineage.client.facet_v2 import dataset_version_dataset, schema_dataset

    facets: dict[str, Any] = {}
    if versioned := _VERSIONED.fullmatch(place):
        place, version = filter(None, versioned.groups())
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(version)
    if columns:
        fields = [schema_dataset.SchemaDatasetFacetFields(*column) for column in columns.items()]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(fields)
    parts = urlsplit(place)
    if parts.scheme in ("", "file"):
        return {"namespace": "file", "name": str(Path(parts.path).absolute()), "facets": facets}
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    # Keys of a store begin without a slash, paths of a file system with one.
    path = parts.path if scheme == "hdfs" else parts.path.strip("/")
    return {"namespace": f"{scheme}://{parts.netloc}", "name": path, "facets": facets}
