"""Databases for tests: Derby, which comes with Spark, and PostgreSQL where it is installed."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@contextmanager
def connect_derby(spark: Any, url: str) -> Iterator[Any]:
    """Opens a database in memory; gives a JDBC statement."""
    jvm = spark._jvm
    jvm.org.apache.spark.sql.execution.datasources.jdbc.DriverRegistry.register(
        "org.apache.derby.iapi.jdbc.AutoloadedDriver"
    )
    connection = jvm.java.sql.DriverManager.getConnection(url)
    try:
        yield connection.createStatement()
    finally:
        connection.close()


JAR_VARIABLE = "SLUICE_POSTGRES_JAR"
HOME_VARIABLE = "SLUICE_POSTGRES_HOME"
"""Folder of a server that is not in the path: its programs are in `bin`."""
USER = "reader"
DATABASE = "postgres"


class PostgresUnavailableError(Exception):
    """The machine lacks the server or the driver; the message says which."""


@dataclass(frozen=True)
class Postgres:
    """A running server."""

    port: int
    password: str
    programs: Path

    @property
    def url(self) -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/{DATABASE}"

    def run(self, statements: str) -> None:
        client = _client(self.programs) or "psql"
        command = [client, "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, DATABASE]
        environment = {**os.environ, "PGPASSWORD": self.password}
        subprocess.run(
            [*command, "-v", "ON_ERROR_STOP=1", "-c", statements], env=environment, check=True
        )


def driver_jar() -> str:
    """The JDBC driver, from the variable or where Debian's package puts it."""
    places = [os.environ.get(JAR_VARIABLE), "/usr/share/java/postgresql.jar"]
    for place in places:
        if place and Path(place).is_file():
            return place
    raise PostgresUnavailableError(f"no PostgreSQL driver: set {JAR_VARIABLE} to its jar")


def find_programs() -> Path:
    """Folder of the server's programs, from the variable or the path."""
    home = os.environ.get(HOME_VARIABLE)
    # Debian links one program of the server into the path; the others lie beside it.
    found = str(Path(home) / "bin" / "postgres") if home else shutil.which("postgres")
    programs = Path(found).resolve().parent if found else None
    if programs is None or not _client(programs) or not (programs / "initdb").exists():
        raise PostgresUnavailableError(
            f"no PostgreSQL server: set {HOME_VARIABLE} to the folder whose bin has initdb, "
            "postgres and psql"
        )
    return programs


def _client(programs: Path) -> str | None:
    return shutil.which("psql", path=str(programs)) or shutil.which("psql")


@contextmanager
def start_postgres() -> Iterator[Postgres]:
    """Starts a server in a folder of its own, and stops it."""
    programs = find_programs()
    folder = Path(tempfile.mkdtemp(prefix="sluice-postgres-", dir="/tmp"))
    # The server refuses to run as root.
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Postgres(port, secrets.token_hex(16), programs)
    password_file = folder / "password"
    password_file.write_text(server.password)
    data = folder / "data"
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", USER, "-A", "scram-sha-256", "--no-sync",
         f"--pwfile={password_file}"],
        user=user, check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    process = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
         "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"],
        user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait(server, programs)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: Postgres, programs: Path) -> None:
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(server.port)]
    for _ in range(240):
        if subprocess.run(ready).returncode == 0:
            return
        time.sleep(0.25)
    raise PostgresUnavailableError("the PostgreSQL server did not start within a minute")
