"""Airflow's own processes (scheduler, DAG processor, API server), and a client of their API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 300.0


class Airflow:
    """A client of a running Airflow, as its administrator.

    Args:
        url: Of the API server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._token = ""

    def log_in(self) -> None:
        """Gets a token; every caller is an administrator here."""
        self._token = self._call("GET", "/auth/token")["access_token"]

    def ask(self, path: str, body: Mapping[str, Any] | None = None, method: str = "") -> Any:
        """Calls the public API.

        Args:
            path: Behind `/api/v2`.
            body: JSON to send; None: none.
            method: HTTP method; empty: POST with a body, else GET.
        """
        return self._call(method or ("GET" if body is None else "POST"), f"/api/v2{path}", body)

    def unpause(self, dag: str, is_paused: bool = False) -> None:
        """Lets a DAG's schedule begin, or stops it."""
        self.ask(f"/dags/{dag}", {"is_paused": is_paused}, "PATCH")

    def trigger(self, dag: str, conf: Mapping[str, Any]) -> str:
        """Starts a run by hand and returns its id."""
        body = {"logical_date": None, "conf": conf}
        return str(self.ask(f"/dags/{dag}/dagRuns", body)["dag_run_id"])

    def list_runs(self, dag: str) -> list[dict[str, Any]]:
        """Returns the runs of a DAG, the first one first."""
        return list(self.ask(f"/dags/{dag}/dagRuns?order_by=run_after&limit=100")["dag_runs"])

    def list_tasks(self, dag: str, run: str) -> dict[str, dict[str, Any]]:
        """Returns the tasks of a run by name."""
        found = self.ask(f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances")
        return {task["task_id"]: task for task in found["task_instances"]}

    def list_tries(self, dag: str, run: str, task: str) -> list[dict[str, Any]]:
        """Returns every try of a task of a run."""
        where = f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances/{task}/tries"
        return list(self.ask(where)["task_instances"])

    def clear(self, dag: str, run: str) -> None:
        """Makes all tasks of a finished run run once more."""
        where = f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/clear"
        self.ask(where, {"dry_run": False, "only_failed": False})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from None


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Waits until something is true, and returns it.

    Raises:
        AssertionError: It was not true in time.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(2)
    return found


@contextmanager
def run_airflow(python: str, home: Path, settings: Mapping[str, str]) -> Iterator[Airflow]:
    """Runs `airflow standalone` while the block runs.

    Args:
        python: Python of an environment that has Airflow.
        home: Folder of its database, configuration and logs.
        settings: Further variables of its processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        **settings,
    }
    home.mkdir(parents=True)
    with (home / "standalone.log").open("w") as log:
        process = subprocess.Popen(
            [python, "-m", "airflow", "standalone"], env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            airflow = Airflow(url)
            wait_until(lambda: _is_up(airflow, process), START_S, "the start of Airflow")
            yield airflow
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_up(airflow: Airflow, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Airflow has ended; standalone.log says why"
    try:
        airflow.log_in()
        health = airflow.ask("/monitor/health")
        return all(health[part]["status"] == "healthy" for part in ("scheduler", "dag_processor"))
    except (AssertionError, OSError, KeyError):
        return False
