"""The DAGs: what they import and call, and whole runs by Airflow in an environment of its own."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest
import typer

from conf.artefacts.export import list_versions, read_versions
from conf.artefacts.run import read_json
from jobs.cli import SUBCOMMANDS, _import

DAGS = Path(__file__).parents[2] / "jobs" / "dags"
FILES = sorted(DAGS.glob("*.py"))
AIRFLOW = "SLUICE_AIRFLOW"
CALL = re.compile(r"\bsluice ([a-z]+)((?:[^\n)]|\\\n)*)")


def constants(path: Path) -> list[str]:
    """Texts of a file that are no documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dag_file_imports_airflow_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    beside = {file.stem for file in FILES}
    assert imported - set(sys.stdlib_module_names) - beside <= {"airflow"}


def test_the_dags_call_commands_and_options_that_exist() -> None:
    called = set()
    for text in (text for path in FILES for text in constants(path)):
        for name, rest in CALL.findall(text):
            command = typer.main.get_command(_import(SUBCOMMANDS[name][0]).app)
            words = rest.split()
            if hasattr(command, "commands"):
                called.add(f"{name} {words[0]}")
                command = command.commands[words[0]]
            else:
                called.add(name)
            options = {opt for parameter in command.params for opt in parameter.opts}
            used = set(re.findall(r"(?<![\w-])(--[a-z-]+)", rest))
            assert used <= options, (name, used - options)
    assert called == {
        "build", "versions current", "train", "evaluate", "compare", "export", "index",
        "models published", "models list", "models rollback",
    }  # fmt: skip


def shell(name: str) -> str:
    """The Bash of a task, with what stands before each of them."""
    found = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                found[ast.unparse(node.targets[0])] = node.value.value
    return found["_SHELL"] + found[name]


WORSE, CRASHED = '{"passed": false}', ""
VERSIONS = "\n".join(
    json.dumps({"version": n, "withdrawn": n == 3}) for n in (1, 2, 3)
)  # fmt: skip
DAY = {"DAY": "2026-01-31", "DAY_TO": "2026-01-31", "NOT_READY": "99", "REFIT": "--refit"}
NEW = {"PUBLISHED": "", "WARM_START": "True"}


@pytest.mark.parametrize(
    ("name", "variables", "answer", "code", "said"),
    [
        ("WAIT", DAY, (0, "plan"), 0, ""),
        ("WAIT", DAY, (4, ""), 99, ""),
        ("WAIT", {**DAY, "NOT_READY": "4"}, (4, ""), 4, ""),
        ("WAIT", DAY, (3, ""), 3, ""),
        ("WAIT", {**DAY, "DAY": ""}, (0, ""), 2, "this run has no date"),
        ("WAIT", {**DAY, "MARKER": "no/{date}/_SUCCESS"}, (0, ""), 99, "no/2026-01-31/_SUCCESS is"),
        ("BUILD", {**DAY, "DAY": ""}, (0, ""), 2, "this run has no date"),
        ("BUILD", DAY, (4, ""), 4, ""),
        ("BUILD", DAY, None, 0, "--date-to 2026-01-31 --refit --log-format json"),
        ("FIND_PUBLISHED", {}, (0, '{"run": "r"}'), 0, '{"run": "r"}'),
        ("FIND_PUBLISHED", {}, (4, ""), 0, ""),
        ("FIND_PUBLISHED", {}, (3, ""), 3, ""),
        ("TRAIN", {**NEW, "PUBLISHED": "a b"}, None, 0, "--set fit.warm_start=a b --once"),
        ("TRAIN", NEW, None, 0, "--dataset v --once"),
        ("TRAIN", {"PUBLISHED": "r", "WARM_START": "False"}, None, 0, "--dataset v --once"),
        ("TRAIN", NEW, (143, ""), 143, ""),
        ("GATE", {"PUBLISHED": ""}, (6, WORSE), 0, "no model was published before"),
        ("GATE", {}, (6, WORSE), 99, '"passed": false'),
        ("GATE", {}, (1, WORSE), 1, ""),  # The code decides, not the text.
        ("GATE", {}, (1, CRASHED), 1, ""),
        ("GATE", {}, (3, CRASHED), 3, ""),
        ("GATE", {}, (0, '{"passed": true}'), 0, '{"passed": true}'),
        ("GATE", {"METRIC": "auc"}, None, 0, "--metric auc --margin -0.01"),
        ("EXPORT", {}, None, 0, "export --run run --to m --name n --keep 7 --once"),
        ("EXPORT", {}, (0, '{"export": "m/n/.withdrawn/2"}'), 99, "is not published again"),
        ("INDEX", {"EXPORTED": "m"}, None, 0, "index --export m --once"),
        ("CHOOSE", {"TO": "7"}, (0, ""), 0, '{"version": 7}'),
        ("CHOOSE", {"TO": ""}, (0, VERSIONS), 0, '{"version": 1, "withdrawn": false}'),
        ("CHOOSE", {"TO": ""}, (0, VERSIONS.partition("\n")[0]), 2, "no version before"),
        ("NOTIFY", {"FAILED": "yes", "DONE": ""}, (0, ""), 0, "failed: dag run"),
        ("NOTIFY", {"FAILED": "", "DONE": "x"}, (0, ""), 0, "published by dag: x"),
        ("NOTIFY", {"FAILED": "", "DONE": ""}, (0, ""), 0, "gate or export of run says why"),
    ],
)
def test_a_task_ends_as_its_command_does(tmp_path, name, variables, answer, code, said) -> None:
    command = tmp_path / "sluice"
    code_of, text = answer or (0, "$*")
    command.write_text(f"#!/bin/bash\ncat <<EOF\n{text}\nEOF\nexit {code_of}\n")
    command.chmod(0o755)
    known = {"PUBLISHED": "old", "VERSION": "v", "RUN": "run", "MARGIN": "-0.01", "METRIC": "",
             "MARKER": "", "DATA": str(tmp_path), "BUILD_CONFIG": "b", "TRAIN_CONFIG": "t",
             "MODELS": "m", "MODEL": "n", "DATASET": "d", "KEEP": "7", "NOTIFY": "",
             "AIRFLOW_CTX_DAG_ID": "dag", "AIRFLOW_CTX_DAG_RUN_ID": "run",
             "SLUICE_COMMAND": str(command), "PATH": os.environ["PATH"], **variables}  # fmt: skip
    found = subprocess.run(
        ["bash", "-c", shell(name)], env=known, capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == code, found.stderr
    assert said in found.stdout + found.stderr
    if code == 0 and name != "NOTIFY":  # the last line is the result, or empty
        assert found.stdout.endswith("\n")


def write_day(folder: Path, day: date, seed: int) -> None:
    """A day's log: users of one of four groups meet items of their group most of the time."""
    rng, start = random.Random(seed), (day - date(1970, 1, 1)).days * 86_400_000
    folder.mkdir(parents=True)
    lines = [
        f"{user}\t{rng.randrange(10) * 4 + (user % 4 if rng.random() < 0.9 else rng.randrange(4))}"
        f"\t{start + event * 600_000 + user}"
        for user in range(60)
        for event in range(8)
    ]
    (folder / "log.tsv").write_text("\n".join(lines) + "\n")


BUILD = """
name: shop
sources:
  log:
    path: "log/date={{date}}"
    days: {{lookback_days: 1}}
    columns:
      - {{name: user_id, type: int64}}
      - {{name: item_id, type: int64}}
      - {{name: ts, type: int64, unit: ms}}
events: {{source: log, user: user_id, item: item_id, time: ts}}
split: {{strategy: leave_one_out, validation: 20}}
features:
  - {{name: user_id, column: user_id, role: user}}
  - {{name: item_id, column: item_id, role: item}}
output: {{root: "{root}/datasets", shards: 1}}
spark: {{master: "local[1]", driver.memory: 1g}}
"""
TRAIN = """
name: shop
root: "{root}/runs"
dataset: "{root}/datasets/shop"
model: {{name: mf, embedding_dim: 8}}
input: {{batch_size: 64}}
optimizer: {{learning_rate: 0.05}}
fit: {{epochs: 20, early_stopping: null, steps_per_loop: 4, checkpoint: {{every_steps: 4}}}}
"""
# Breaks each thing once: a day's log comes late, and training is killed in the middle.
COMMAND = """#!/bin/bash
run() { "{python}" -m jobs.cli "$@"; }
case "$*" in
  build*"--date 2026-01-04"*--dry-run*)
    run "$@"; code=$?
    [ -d "{root}/late" ] && mv "{root}/late" "{root}/log/date=2026-01-04"
    exit $code ;;
  train*)
    [ -e "{root}/killed" ] && exec "{python}" -m jobs.cli "$@"
    touch "{root}/killed"
    "{python}" -m jobs.cli "$@" & child=$!
    until compgen -G "{root}/runs/shop/runs/*/checkpoints/last/00001*" > /dev/null; do
      kill -0 $child || exit 1
      sleep 0.05
    done
    kill -9 $child; wait $child ;;
  *) exec "{python}" -m jobs.cli "$@" ;;
esac
"""
GOOD = {"margin": -1}
STEPS = [
    ("sluice_daily", "2026-01-04", {}),
    ("sluice_daily", "2026-01-05", GOOD),
    ("sluice_daily", "2026-01-05", GOOD),  # a finished run once more
    ("sluice_daily", None, {}),
    ("sluice_backfill", None, {"first": "2026-01-02", "last": "2026-01-03", "margin": 1}),
    ("sluice_rollback", None, {}),
    ("sluice_update", None, GOOD),
    ("sluice_hourly", "2026-01-05", {}),  # nothing new; the day's version is current again
    ("sluice_update", None, GOOD),  # its model was withdrawn
    ("sluice_hourly", "2026-01-06", {}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    if AIRFLOW not in os.environ:
        pytest.skip(f"{AIRFLOW} is not set: the Python of an environment with Airflow 3.3")
    root = tmp_path_factory.mktemp("airflow")
    for number in range(5):
        day = date(2026, 1, 1) + timedelta(days=number)
        late = root / "late" if number == 3 else root / "log" / f"date={day}"
        write_day(late, day, number)
    (root / "build.yaml").write_text(BUILD.format(root=root))
    (root / "train.yaml").write_text(TRAIN.format(root=root))
    command = root / "sluice"
    command.write_text(COMMAND.replace("{python}", sys.executable).replace("{root}", str(root)))
    command.chmod(0o755)
    (root / "steps.json").write_text(json.dumps(STEPS))
    settings = {
        "COMMAND": command, "DIRECTORY": root, "DATA": root, "DATASET": root / "datasets/shop",
        "MODELS": root / "models", "MODEL": "shop", "INDEX": "yes", "MARGIN": "-1",
        "RETRY_SECONDS": "0.1",
        "NOTIFY": f'echo "$MESSAGE" >> {root}/messages',
    }  # fmt: skip
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        **{f"SLUICE_{name}": str(value) for name, value in settings.items()},
        "AIRFLOW_HOME": str(root / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    script = Path(__file__).with_name("airflow_runs.py")
    results = root / "results.json"
    with (root / "log.txt").open("w") as log:
        subprocess.run(
            [os.environ[AIRFLOW], script, DAGS, root / "steps.json", results],
            env=environment, stdout=log, stderr=log, check=True, cwd=root,
        )  # fmt: skip
        # The build once more, by spark-submit: the one of this environment.
        bin_folder = Path(sys.executable).parent
        submit = {
            "SLUICE_OPERATOR": "spark_submit",
            "SLUICE_APPLICATION": str(DAGS.parent / "build_dataset.py"),
            "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[1]"}',
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYSPARK_PYTHON": sys.executable,
        }
        (root / "submit.json").write_text(json.dumps([("sluice_hourly", "2026-01-05", {})]))
        subprocess.run(
            [os.environ[AIRFLOW], script, DAGS, root / "submit.json", root / "submitted.json"],
            env=environment | submit, stdout=log, stderr=log, check=True, cwd=root,
        )  # fmt: skip
    return root, json.loads(results.read_text()) + json.loads((root / "submitted.json").read_text())


def states(run: dict) -> dict[str, str]:
    return {task: state for task, (state, _) in run["tasks"].items()}


@pytest.mark.exhaustive
def test_two_days_are_built_trained_and_published(runs) -> None:
    root, (first, second, *_) = runs
    for run in (first, second):
        assert run["state"] == "success"
        assert states(run).pop("notify_failure") == "skipped"
        assert {state for name, state in states(run).items() if name != "notify_failure"} == {
            "success"
        }
    index = root / "models" / "shop" / "1" / "index"
    assert [path.name for path in index.iterdir() if path.name.isdigit()] == ["1"]
    # The log came late, and training was killed: each was tried again, once.
    assert {name: tries for name, (_, tries) in first["tasks"].items() if tries > 1} == {
        "wait": 2,
        "train": 2,
    }
    one, two, *_ = read_versions(root / "models" / "shop")
    before = read_json(Path(two.run) / "warm_start.json")["source"]
    assert before.startswith(one.run)
    assert read_json(Path(two.run) / "comparison.json")["against"] == one.run


@pytest.mark.exhaustive
def test_what_is_repeated_loses_and_doubles_nothing(runs) -> None:
    root, (_, second, again, *_) = runs
    assert again == second
    trained = sorted((root / "runs" / "shop" / "runs").iterdir())
    assert len(trained) == 4  # two days, the backfill, the update
    for run in trained:
        assert read_json(run / "run_card.json")["status"] == "trained"
        assert len(json.loads((run / "history.json").read_text())) == 20
    assert len(list((root / "datasets" / "shop" / "versions").iterdir())) == 3
    assert len(read_versions(root / "models" / "shop")) == 2


@pytest.mark.exhaustive
def test_a_run_without_a_date_fails_at_once_and_says_why(runs) -> None:
    root, results = runs
    without = results[3]
    assert without["state"] == "failed"
    assert without["tasks"]["wait"] == ["failed", 1]
    assert states(without)["build"] == "upstream_failed"
    assert states(without)["notify_failure"] == "success"
    assert "this run has no date; trigger it with" in (root / "log.txt").read_text()
    assert "failed: sluice_daily" in (root / "messages").read_text()


@pytest.mark.exhaustive
def test_a_worse_model_is_kept_back_and_a_published_one_is_withdrawn(runs) -> None:
    root, results = runs
    backfill, rollback, update, unchanged, withdrawn, early, _ = results[4:]
    assert backfill["state"] == "success"
    assert states(backfill) | {"gate": "skipped", "export": "skipped"} == states(backfill)
    assert "kept by sluice_backfill" in (root / "messages").read_text()
    assert rollback["state"] == unchanged["state"] == update["state"] == "success"
    assert withdrawn["state"] == "success"
    assert (states(withdrawn)["export"], states(withdrawn)["index"]) == ("skipped", "skipped")
    assert set(states(early).values()) == {"skipped"}  # the day has no file yet
    model = root / "models" / "shop"
    # What the backfill made current ends before the published model's days: it is kept back too.
    assert (states(update)["gate"], states(update)["export"]) == ("skipped", "skipped")
    assert list_versions(model) == [1]
    assert [version.is_withdrawn for version in read_versions(model)] == [False, True]


@pytest.mark.exhaustive
def test_a_build_by_spark_submit_is_the_same_version(runs) -> None:
    root, results = runs
    assert results[-1]["state"] == "success"
    assert {name: state for name, (state, _) in results[-1]["tasks"].items()} == dict.fromkeys(
        ("wait", "submit_build", "build"), "success"
    )
    assert len(list((root / "datasets" / "shop" / "versions").iterdir())) == 3


@pytest.mark.exhaustive
def test_an_exit_code_decides_whether_a_task_is_tried_again(runs) -> None:
    root, _ = runs
    found = json.loads((root / "results.json.policy").read_text())
    failing = {f"{how} {code}": "fail" for how in ("bash", "spark") for code in (2, 3, 5, 6)}
    retried = {f"{how} {code}": "retry" for how in ("bash", "spark") for code in (4, 130, 143)}
    others = {f"{how} {code}": "default" for how in ("bash", "spark") for code in (1, 137, -9)}
    assert found == {**failing, **retried, **others, "timeout": "default", "third": "fail"}
