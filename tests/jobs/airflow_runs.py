"""Runs of DAGs by `dag.test()`, in an environment that has Airflow and nothing of Sluice.

`python airflow_runs.py DAGS_FOLDER STEPS.json RESULTS.json`: a step is `[dag id, day or null,
conf]`; its result is the state of the run, and state and number of tries of each task.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path


def main(folder: str, steps: Path, results: Path) -> None:
    """Runs the steps one after the other."""
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True)
    from airflow.dag_processing.dagbag import DagBag

    sys.path.insert(0, folder)  # as Airflow's own processes do
    Path(f"{results}.policy").write_text(json.dumps(decide()))
    bag = DagBag(dag_folder=folder)
    assert not bag.import_errors, bag.import_errors
    found = []
    for dag_id, day, conf in json.loads(steps.read_text()):
        moment = None if day is None else datetime.fromisoformat(day).replace(tzinfo=UTC)
        run = bag.dags[dag_id].test(logical_date=moment, run_conf=conf)
        tasks = {t.task_id: [str(t.state), t.try_number] for t in run.get_task_instances()}
        found.append({"state": str(run.state), "tasks": tasks})
        results.write_text(json.dumps(found))


def decide() -> dict[str, str]:
    """What becomes of a task that failed, by how and why it did."""
    from sluice_tasks import ExitCodePolicy

    def ask(message: str, tries: int = 1) -> str:
        return ExitCodePolicy().evaluate(RuntimeError(message), tries, 8).action.value

    texts = {
        "bash": "Bash command failed. The command returned a non-zero exit code {}.",
        "spark": "Cannot execute: spark-submit --name x. Error code is: {}.",
    }
    codes = (1, 2, 3, 4, 5, 6, 130, 137, 143, -9)
    found = {
        f"{how} {code}": ask(text.format(code)) for how, text in texts.items() for code in codes
    }
    return {**found, "timeout": ask("Timeout"), "third": ask("Timeout", 3)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
