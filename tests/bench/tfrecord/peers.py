"""The other ways to do the work, each in an environment of its own, and whether it is there."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from etl.records.jvm_connector import CONNECTOR_PACKAGE
from tests.bench.tfrecord import tfx_peer

TFX_PYTHON_VARIABLE = "SLUICE_TFX_PYTHON"
CONNECTOR_JAR_VARIABLE = "SLUICE_CONNECTOR_JAR"


class PeerMissingError(Exception):
    """A peer is not on this machine; says what to do about it."""


@dataclass(frozen=True)
class TfxBsl:
    """tfx_bsl in an environment of its own.

    Attributes:
        python: Interpreter of that environment.
    """

    python: Path

    def run(self, *arguments: str | Path) -> str:
        """Runs `tfx_peer` there and returns what it printed.

        Raises:
            PeerMissingError: It failed.
        """
        command = [str(self.python), tfx_peer.__file__, *map(str, arguments)]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise PeerMissingError(f"tfx_bsl failed: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def time(self, batch: pa.RecordBatch, repeats: int) -> dict[str, Any]:
        """Wall and CPU seconds of encoding and decoding a batch, and the records' bytes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.arrow"
            tfx_peer.write_batch(str(path), batch)
            return json.loads(self.run("time", path, str(repeats)).splitlines()[-1])


def find_tfx_bsl(python: str | None = None) -> TfxBsl:
    """Finds the environment of tfx_bsl.

    Args:
        python: Its interpreter; None to take it from the environment variable.

    Raises:
        PeerMissingError: None was named, or it is not there.
    """
    named = python or os.environ.get(TFX_PYTHON_VARIABLE)
    if not named:
        raise PeerMissingError(
            f"tfx_bsl: no environment named; make one (python3.11 -m venv tfx && tfx/bin/pip "
            f"install tfx-bsl==1.21.0) and set {TFX_PYTHON_VARIABLE}=tfx/bin/python"
        )
    if not Path(named).is_file():
        raise PeerMissingError(f"tfx_bsl: there is no {named}")
    return TfxBsl(Path(named))


@dataclass(frozen=True)
class Connector:
    """The JVM connector, for sessions that are to load it.

    Attributes:
        jar: Its jar on this machine; None to have Spark resolve `package`.
        package: Maven coordinates.
        ivy: Folder for what Spark resolves; None for Spark's own.
    """

    jar: Path | None = None
    package: str = CONNECTOR_PACKAGE
    ivy: Path | None = None

    @property
    def conf(self) -> dict[str, str]:
        """Spark settings that bring it to the class path."""
        if self.jar is not None:
            return {"spark.jars": str(self.jar.resolve())}
        conf = {"spark.jars.packages": self.package}
        return conf if self.ivy is None else {**conf, "spark.jars.ivy": str(self.ivy.resolve())}


def find_connector(
    jar: str | None = None, package: str = CONNECTOR_PACKAGE, ivy: str | None = None
) -> Connector:
    """The JVM connector by a jar, or by coordinates; whether those resolve shows when Spark starts.

    Args:
        jar: Path of a jar; None to take it from the environment variable, if that is set.
        package: Maven coordinates, where there is no jar.
        ivy: Folder for what Spark resolves.

    Raises:
        PeerMissingError: The jar is not there.
    """
    named = jar or os.environ.get(CONNECTOR_JAR_VARIABLE)
    if named and not Path(named).is_file():
        raise PeerMissingError(f"JVM connector: there is no {named}")
    return Connector(Path(named) if named else None, package, Path(ivy) if ivy else None)
