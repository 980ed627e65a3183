"""The tests' end of the connector's session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs.bench.tfrecord.peers import find_connector
from tests.contract.connector_server import REPLY

ROOT = Path(__file__).parents[2]


class ConnectorUnavailableError(Exception):
    """The connector's jar is not here and cannot be resolved."""


class ConnectorFailedError(Exception):
    """The connector refused, or crashed."""


class ConnectorSession:
    """Context manager: a process with the connector."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> ConnectorSession:
        conf = find_connector().conf
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.connector_server", json.dumps(conf)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            )  # fmt: skip
        try:
            self._receive()
        except ConnectorFailedError as error:
            self.__exit__()
            if "unresolved dependency" in str(error):
                raise ConnectorUnavailableError(
                    "Spark cannot resolve the JVM connector from Maven here; set "
                    "SLUICE_CONNECTOR_JAR to its jar"
                ) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return dict(json.loads(line.removeprefix(REPLY)))
        raise ConnectorFailedError(self._log.read_text())

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        """Runs one operation of the server and returns its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"operation": operation, **request}) + "\n")
        self._process.stdin.flush()
        reply = self._receive()
        if "error" in reply:
            raise ConnectorFailedError(reply["error"])
        return reply
