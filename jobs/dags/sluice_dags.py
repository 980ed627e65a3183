"""The DAGs: daily, hourly with an update of the model, backfill, rollback.

Each is a chain of `sluice` commands. What a task hands on is the last line that its command prints:
the dataset version, the run, the exported version. Every command can be repeated: a version that is
built, a run that is trained, a model that is exported is found again and not made a second time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, CronDataIntervalTimetable, Param
from sluice_tasks import (
    BUILD_PARAMS,
    BUILD_POOL,
    DATASET,
    DAY,
    MODEL,
    PARAMS,
    REFIT,
    WAIT_TRIES,
    read_setting,
    run_command,
    submit_build,
)

WAIT = """
require_day
marker=${MARKER//\\{date\\}/$DAY_TO}
if [ -n "$marker" ] && [ ! -e "$DATA/$marker" ]; then
  echo "error: $DATA/$marker is not there yet" >&2
  exit $NOT_READY
fi
code=0
sluice build "$BUILD_CONFIG" --data "$DATA" --date "$DAY" --date-to "$DAY_TO" --dry-run \\
  --log-format json > /dev/null || code=$?
[ $code -ne 4 ] || exit $NOT_READY
[ $code -eq 0 ] || exit $code
echo
"""
BUILD = """
require_day
result=$(sluice build "$BUILD_CONFIG" --data "$DATA" --date "$DAY" --date-to "$DAY_TO" \\
  "$REFIT" --log-format json)
echo "$result"
"""
FIND_VERSION = """
result=$(sluice versions current "$DATASET" --log-format json)
echo "$result"
"""
FIND_PUBLISHED = """
code=0
result=$(sluice models published "$MODELS/$MODEL" --before "$VERSION" --log-format json) || code=$?
[ $code -eq 0 ] || [ $code -eq 4 ] || exit $code
echo "$result"
"""
TRAIN = """
warm=()
if [ "$WARM_START" = True ] && [ -n "$PUBLISHED" ]; then
  warm=(--set "fit.warm_start=$PUBLISHED")
fi
result=$(sluice train "$TRAIN_CONFIG" --dataset "$VERSION" "${warm[@]}" --once --log-format json)
echo "$result"
"""
EVALUATE = """
result=$(sluice evaluate --run "$RUN" --log-format json)
echo "$result"
"""
GATE = """
if [ -z "$PUBLISHED" ]; then
  echo '{"passed": true, "why": "no model was published before"}'
  exit 0
fi
code=0
result=$(sluice compare --run "$RUN" --against "$PUBLISHED" --dataset "$VERSION" \\
  ${METRIC:+--metric "$METRIC"} --margin "$MARGIN" --log-format json) || code=$?
echo "$result"
[ $code -ne 6 ] || exit 99
exit $code
"""
EXPORT = """
result=$(sluice export --run "$RUN" --to "$MODELS" --name "$MODEL" --keep "$KEEP" --once \\
  --log-format json)
echo "$result"
case "$result" in
  */.withdrawn/*)
    echo 'this run was published and withdrawn; it is not published again' >&2
    exit 99 ;;
esac
"""
INDEX = """
result=$(sluice index --export "$EXPORTED" --once --log-format json)
echo "$result"
"""
CHOOSE = """
if [ -n "$TO" ]; then
  echo "{\\"version\\": $TO}"
  exit 0
fi
versions=$(sluice models list "$MODELS/$MODEL" --log-format json)
published=$(grep '"withdrawn": false' <<< "$versions")
if [ "$(wc -l <<< "$published")" -lt 2 ]; then
  echo 'error: there is no version before the published one; trigger with {"to": VERSION}' >&2
  exit 2
fi
tail -n 2 <<< "$published" | head -n 1
"""
ROLL_BACK = """
result=$(sluice models rollback "$MODELS/$MODEL" --to "$TO" --log-format json)
echo "$result"
"""
NOTIFY = """
export MESSAGE
if [ -n "$FAILED" ]; then
  MESSAGE="failed: $AIRFLOW_CTX_DAG_ID $AIRFLOW_CTX_DAG_RUN_ID"
elif [ -n "$DONE" ]; then
  MESSAGE="published by $AIRFLOW_CTX_DAG_ID: $DONE"
else
  MESSAGE="kept by $AIRFLOW_CTX_DAG_ID: the published model stays; gate or export of $RUN says why"
fi
echo "$MESSAGE"
[ -z "$NOTIFY" ] || bash -c "$NOTIFY"
echo
"""


def pull(task_id: str, key: str) -> str:
    """Returns the template of one value of a task's result; empty where it has none."""
    return f"{{{{ (ti.xcom_pull(task_ids='{task_id}') or {{}}).get('{key}', '') }}}}"


def new_dag(
    dag_id: str, description: str, schedule: Any, first_day: str = "", **params: Param
) -> DAG:
    """Returns a DAG that runs one run at a time.

    Args:
        dag_id: Its name.
        description: What it does.
        schedule: When it runs.
        first_day: Day from which it makes up for days that have passed; empty: for none.
        **params: What it may be triggered with beside the usual.
    """
    return DAG(
        dag_id,
        description=description,
        schedule=schedule,
        start_date=datetime.fromisoformat(first_day or "2020-01-01").replace(tzinfo=UTC),
        catchup=bool(first_day),
        max_active_runs=1,
        dagrun_timeout=timedelta(hours=20),
        params={**PARAMS, **params},
        tags=["sluice"],
        doc_md=f"{description} Settings: `SLUICE_…`, see the guide's page on Airflow.",
    )


def every(setting: str, cron: str) -> CronDataIntervalTimetable:
    """Returns a schedule whose runs are dated by the start of their interval."""
    return CronDataIntervalTimetable(read_setting(setting, cron), timezone="UTC")


def build_days(days: tuple[str, str], not_ready: int = 4, **options: Any) -> Any:
    """Adds the wait for some days and their build, by Bash or by spark-submit.

    Args:
        days: Templates of the first day and of the last one.
        not_ready: Exit code of the wait where a day is not there: 4 waits on, 99 skips the run.
        **options: Of the task that has the version.

    Returns:
        The task whose result has the version.
    """
    env = {"DAY": days[0], "DAY_TO": days[1], "NOT_READY": str(not_ready), "REFIT": REFIT}
    wait = run_command("wait", WAIT, env=env, pool=BUILD_POOL, retries=WAIT_TRIES)
    if read_setting("OPERATOR", "bash") == "bash":
        return wait >> run_command("build", BUILD, env=env, pool=BUILD_POOL, **options)
    submitted = wait >> submit_build("submit_build", days)
    return submitted >> run_command("build", FIND_VERSION, **options)


def add_model(built: Any) -> None:
    """Adds what makes a model of a dataset version and publishes it, unless it is worse.

    Args:
        built: The task whose result has the version.
    """
    known = {"VERSION": pull("build", "version")}
    published = run_command("find_published", FIND_PUBLISHED, env=known)
    known |= {"PUBLISHED": pull("find_published", "run"), "WARM_START": "{{ params.warm_start }}"}
    train = run_command("train", TRAIN, env=known)
    known |= {"RUN": pull("train", "run")}
    evaluate = run_command("evaluate", EVALUATE, env=known)
    compared = {"METRIC": "{{ params.metric or '' }}", "MARGIN": "{{ params.margin }}"}
    gate = run_command("gate", GATE, env={**known, **compared})
    last = export = run_command("export", EXPORT, env=known, outlets=[MODEL])
    built >> published >> train >> evaluate >> gate >> export
    if read_setting("INDEX"):
        last = run_command("index", INDEX, env={"EXPORTED": pull("export", "export")})
        export >> last
    last >> notify("export", **known)


def notify(after: str, **known: str) -> list[Any]:
    """Returns the tasks that tell how a run ended: well, or not.

    Args:
        after: The task whose result is reported.
        **known: Further variables of the command.
    """
    known = {"RUN": "", "DONE": f"{{{{ ti.xcom_pull(task_ids='{after}') or '' }}}}", **known}
    timeout = timedelta(minutes=10)
    return [
        run_command(
            task_id, NOTIFY, env={**known, "FAILED": failed}, trigger_rule=rule,
            execution_timeout=timeout,
        )
        for task_id, failed, rule in (
            ("notify", "", "none_failed"),
            ("notify_failure", "yes", "one_failed"),
        )
    ]  # fmt: skip


with new_dag(
    "sluice_daily",
    "Builds yesterday, trains on it from the published model, publishes unless it is worse.",
    every("DAILY", "0 2 * * *"),
    read_setting("FIRST_DAY"),
    **BUILD_PARAMS,
):
    add_model(build_days((DAY, DAY)))

with new_dag(
    "sluice_hourly",
    "Builds the day so far; its event starts sluice_update.",
    every("HOURLY", "10 * * * *"),
    **BUILD_PARAMS,
):
    build_days((DAY, DAY), not_ready=99, outlets=[DATASET])

with new_dag(
    "sluice_update", "Updates the model where sluice_hourly has built more of a day.", [DATASET]
):
    add_model(run_command("build", FIND_VERSION))

with new_dag(
    "sluice_backfill",
    "Builds several days as one dataset version, trains on it, publishes unless it is worse.",
    None,
    **BUILD_PARAMS,
    first=Param(type="string", format="date", description="First day."),
    last=Param(type="string", format="date", description="Last day."),
):
    add_model(build_days(("{{ params.first }}", "{{ params.last }}")))

with new_dag(
    "sluice_rollback",
    "Withdraws the published model; servers go back to the version before.",
    None,
    to=Param(
        None,
        type=["null", "integer"],
        minimum=1,
        description="Version to go back to; none: the one before the published one.",
    ),
):
    choose = run_command("choose", CHOOSE, env={"TO": "{{ params.to or '' }}"})
    back = run_command(
        "rollback", ROLL_BACK, env={"TO": pull("choose", "version")}, outlets=[MODEL]
    )
    choose >> back >> notify("rollback")
