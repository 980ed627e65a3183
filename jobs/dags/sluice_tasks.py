"""What the DAGs share: settings, parameters, commands as tasks, retries by exit code.

Files of this folder import Airflow (3.3 or later) and nothing of Sluice: copy them into a DAGs
folder, or point one at them. Tasks run the command `sluice`, which may live in an environment of
its own. Values reach the shell as environment variables, never as text of a command.
"""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import Asset, Context, Param, RetryDecision, RetryPolicy

DATASET = Asset(name="sluice_dataset", uri="sluice://dataset")
MODEL = Asset(name="sluice_model", uri="sluice://model")


def read_setting(name: str, default: str = "") -> str:
    """Returns a setting of the deployment: `SLUICE_<NAME>` of Airflow's environment."""
    return os.environ.get(f"SLUICE_{name}", default)


SETTINGS = {
    "SLUICE_COMMAND": read_setting("COMMAND", "sluice"),
    "BUILD_CONFIG": read_setting("BUILD_CONFIG", "build.yaml"),
    "TRAIN_CONFIG": read_setting("TRAIN_CONFIG", "train.yaml"),
    "DATA": read_setting("DATA", "data"),
    "MARKER": read_setting("MARKER"),
    "DATASET": read_setting("DATASET", "work/datasets/demo"),
    "MODELS": read_setting("MODELS", "work/models"),
    "MODEL": read_setting("MODEL", "demo"),
    "KEEP": read_setting("KEEP", "7"),
    "NOTIFY": read_setting("NOTIFY"),
}
"""What every command can read; the guide's page says what each means."""

PARAMS: dict[str, Any] = {
    "date": Param(
        None,
        type=["null", "string"],
        format="date",
        description="Day to build; none: that of the schedule.",
    ),
    "warm_start": Param(
        True, type="boolean", description="Start from the weights of the published model."
    ),
    "metric": Param(
        None,
        type=["null", "string"],
        description="What the gate compares; none: ndcg@10, or the first task's auc or mse.",
    ),
    "margin": Param(
        float(read_setting("MARGIN", "-0.01")),
        type="number",
        description="Least lead over the published model, with 95 % confidence; below 0: most "
        "that may be lost.",
    ),
}
"""What a run may be triggered with."""

BUILD_PARAMS: dict[str, Any] = {
    "refit": Param(
        False,
        type="boolean",
        description="Fit means, deviations and other numbers anew; else those of the version "
        "before are kept.",
    ),
}
"""What a run that builds may be triggered with too."""

DAY = "{{ params.date or partition_key | default(none) or ds | default('', true) }}"
"""The day of a run; empty where it has none."""

REFIT = "{{ '--refit' if params.refit else '--no-refit' }}"
"""Whether a build fits its numbers anew."""

BUILD_POOL = read_setting("BUILD_POOL", "default_pool")
TRAIN_POOL = read_setting("TRAIN_POOL", "default_pool")
LATER = timedelta(seconds=float(read_setting("RETRY_SECONDS", "900")))
WAIT_TRIES = 48
TRIES = 8
FAULTS_RETRIED = 2

_EXIT_CODE = re.compile(r"(?:exit code|Error code is:) (-?\d+)")
_FAILS_AT_ONCE = {
    2: "usage or config",
    3: "input data refused",
    5: "training diverged",
    6: "a gate failed",
}
_NOT_READY = 4
_STATE_SAVED = (130, 143)

_SHELL = """set -euo pipefail
sluice() { "$SLUICE_COMMAND" "$@"; }
require_day() {
  [ -n "$DAY" ] && return
  echo 'error: this run has no date; trigger it with {"date": "2026-01-31"}' >&2
  exit 2
}
"""


class ExitCodePolicy(RetryPolicy):
    """Decides by the exit code of a command, run by Bash or by spark-submit, how to go on.

    4 (not ready) is tried again later, 130 and 143 (ended by a signal, state saved) at once; 2, 3,
    5 and 6 fail at once; any other failure is tried twice more.
    """

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """Returns the decision; arguments as Airflow gives them."""
        match = _EXIT_CODE.search(str(exception))
        code = int(match[1]) if match else None
        if code in _FAILS_AT_ONCE:
            return RetryDecision.fail(f"exit code {code}: {_FAILS_AT_ONCE[code]}")
        if code == _NOT_READY:
            return RetryDecision.retry(LATER, "exit code 4: not ready yet")
        if code in _STATE_SAVED:
            why = f"exit code {code}: ended by a signal, goes on where it was"
            return RetryDecision.retry(min(LATER, timedelta(seconds=10)), why)
        if try_number > FAULTS_RETRIED:
            return RetryDecision.fail(f"failed {try_number} times")
        return RetryDecision.default()


def read_result(line: str) -> Any:
    """Returns what a command printed as its last line: an object, or None where it is empty."""
    return json.loads(line) if line else None


def run_command(task_id: str, command: str, **options: Any) -> BashOperator:
    """Returns a task of one command; its exit code decides whether it is tried again.

    Args:
        task_id: Name of the task.
        command: Bash; reads `SETTINGS` and what `env` adds. Its last line is the task's result.
        **options: Of the operator, in place of those given here.
    """
    usual: dict[str, Any] = {
        "retries": TRIES,
        "retry_delay": min(LATER, timedelta(minutes=5)),
        "retry_policy": ExitCodePolicy(),
        "execution_timeout": timedelta(hours=6),
        "pool": TRAIN_POOL,
        "output_processor": read_result,
        "append_env": True,
        "cwd": read_setting("DIRECTORY", "."),
    }
    environment = {**SETTINGS, "DAY": DAY, **options.pop("env", {})}
    return BashOperator(
        task_id=task_id, bash_command=_SHELL + command, env=environment, **{**usual, **options}
    )


def submit_build(task_id: str, days: tuple[str, str], **options: Any) -> Any:
    """Returns the build as a task of spark-submit, on the cluster of a Spark connection.

    Args:
        task_id: Name of the task.
        days: Templates of the first day and of the last one.
        **options: Of the operator, in place of those given here.
    """
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    usual: dict[str, Any] = {
        "name": "sluice build",
        "application": read_setting("APPLICATION", "jobs/build_dataset.py"),
        "conn_id": read_setting("SPARK_CONNECTION", "spark_default"),
        "py_files": read_setting("PY_FILES") or None,
        "archives": read_setting("ARCHIVES") or None,
        "retries": TRIES,
        "retry_delay": min(LATER, timedelta(minutes=5)),
        "retry_policy": ExitCodePolicy(),
        "execution_timeout": timedelta(hours=6),
        "pool": BUILD_POOL,
    }
    arguments = [
        SETTINGS["BUILD_CONFIG"], "--data", SETTINGS["DATA"],
        "--date", days[0], "--date-to", days[1], REFIT, "--log-format", "json",
    ]  # fmt: skip
    return SparkSubmitOperator(task_id=task_id, application_args=arguments, **{**usual, **options})
