from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.artefacts.run import read_json
from conf.load import load_config, preset_names
from conf.training.train import TrainConfig
from etl.tfrecord.table import write_table
from jobs.cli import main
from jobs.train import train
from training.monitoring.progress import build_progress

SMALL = [
    "--set",
    "model.name=mf",
    "--set",
    "model.embedding_dim=8",
    "--set",
    "input.batch_size=64",
    "--set",
    "fit.epochs=2",
    "--set",
    "name=t",
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.training.tiny_dataset import write_tiny_dataset

    return write_tiny_dataset(tmp_path_factory.mktemp("datasets")).parent.parent


@pytest.mark.parametrize("name", preset_names("training"))
def test_presets_are_valid(name: str) -> None:
    config = load_config(TrainConfig, "training", name)
    assert config.name == name
    stopping = config.fit.early_stopping
    if stopping is not None and "@" in stopping.metric:
        assert int(stopping.metric.partition("@")[2]) in config.evaluation.ks


def test_imported_records_are_inspected_trained_and_reported(tmp_path: Path, capsys) -> None:
    rows = 400
    values = {"user": [n % 7 for n in range(rows)], "item": [n % 20 for n in range(rows)]}
    values["click"] = [int(n % 20 < 9) for n in range(rows)]
    for split in ("train", "validation", "test"):
        write_table(pa.table(values), tmp_path / f"{split}.tfrecord")
    roles = {"user": "user", "item": "item", "click": "label"}
    config = {
        "name": "ours",
        "splits": {split: [f"{split}.tfrecord"] for split in ("train", "validation", "test")},
        "features": [
            {"name": name, "role": role, **({} if name == "click" else {"offset": 2})}
            for name, role in roles.items()
        ],
        "keys": {"user": "user", "item": "item"},
        "output": {"root": str(tmp_path / "datasets")},
    }
    (tmp_path / "ours.yaml").write_text(json.dumps(config))
    assert main(["data", "import", str(tmp_path / "ours.yaml"), "--data", str(tmp_path)]) == 0
    version = str(tmp_path / "datasets" / "ours")
    capsys.readouterr()
    assert main(["inspect", version, "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert {split["name"]: split["rows"] for split in splits}["train"] == rows
    sets = [f"root={tmp_path}/runs", "name=own", "model={kind: ranking, network: fm}",
            "optimizer.learning_rate=0.05", "input.batch_size=50", "fit.epochs=2"]  # fmt: skip
    arguments = [part for setting in sets for part in ("--set", setting)]
    assert main(["train", "--dataset", version, *arguments, "--log-format", "json"]) == 0
    run = Path(json.loads(capsys.readouterr().out.splitlines()[-1])["run"])
    assert main(["evaluate", "--run", str(run)]) == 0
    assert read_json(run / "metrics.json")["tasks"]["click"]["auc"] > 0.95
    assert main(["report", "--run", str(run)]) == 0
    assert "Task click, binary." in (run / "report.html").read_text()


def test_trains_and_prints_the_run(dataset: Path, tmp_path: Path, capsys) -> None:
    code = main(
        [
            "train",
            "--dataset",
            str(dataset),
            "--set",
            f"root={tmp_path}",
            *SMALL,
            "--log-format",
            "json",
        ]
    )
    assert code == 0
    captured = capsys.readouterr()
    run = Path(json.loads(captured.out.splitlines()[-1])["run"])
    assert read_json(run / "run_card.json")["status"] == "trained"
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert [line["event"] for line in lines].count("epoch") == 2
    assert all(isinstance(line["time"], float) for line in lines)
    assert "http" not in (run / "report.html").read_text().replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_progress_and_the_step_log_tell_the_same(
    dataset: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(build_progress, "__defaults__", (1e-9, None))
    settings = [f"root={tmp_path}", "fit.steps_per_loop=5"]
    sets = [part for setting in settings for part in ("--set", setting)]
    arguments = ["--dataset", str(dataset), *SMALL, *sets, "--no-report"]
    assert main(["train", *arguments, "--log-format", "json"]) == 0
    captured = capsys.readouterr()
    run = Path(json.loads(captured.out)["run"])
    assert not (run / "report.html").exists()
    told = [json.loads(line) for line in captured.err.splitlines()]
    steps = [line for line in told if line["event"] == "steps"]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["run_step"] for s in steps] == [entry["step"] for entry in logged]
    assert [s["epoch"] for s in steps] == [entry["epoch"] for entry in logged]
    assert steps[0]["loss"] == pytest.approx(logged[0]["loss"])
    assert steps[0]["metric"] is None
    (first, last) = [line for line in told if line["event"] == "epoch"]
    assert steps[-1]["metric"] == {"name": "ndcg@10", "value": first["validation"]["ndcg@10"]}
    assert steps[-1]["run_step"] == steps[-1]["run_steps"] == 24
    assert steps[-1]["loss"] == pytest.approx(last["loss"])


def test_a_profile_is_in_the_logs(dataset: Path, tmp_path: Path, capsys) -> None:
    sets = ["--set", f"root={tmp_path}", "--profile", "3:5", "--no-report"]
    arguments = ["--dataset", str(dataset), *SMALL, *sets]
    assert main(["train", *arguments]) == 0
    captured = capsys.readouterr()
    run = Path(captured.out.strip().removeprefix("run: "))
    assert f"profiled steps 4 to 5: tensorboard --logdir {run / 'logs'}" in captured.err
    assert list((run / "logs").glob("plugins/profile/*/*.xplane.pb"))


def test_a_report_that_fails_leaves_the_run_trained(
    dataset: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def fail(run: Path) -> Path:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("jobs.reporting.report.write_report", fail)
    assert main(["train", "--dataset", str(dataset), "--set", f"root={tmp_path}", *SMALL]) == 0
    assert "no fonts" in capsys.readouterr().err


def test_a_dry_run_touches_nothing(dataset: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "runs"
    code = main(["train", "--dataset", str(dataset), "--set", f"root={root}", *SMALL, "--dry-run"])
    assert code == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"]["train"] == 780
    assert not root.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "fit.epoch=3"], 2, "epochs"),
        (["--set", "input.batch_size=100000"], 3, "one batch"),
        (["--dataset", "nowhere"], 4, "no published dataset"),
        (["--set", "fit.early_stopping.metric=ndcg@7"], 2, "evaluation.ks"),
        (["--set", "optimizer.learning_rate=1.0e+38"], 5, "diverged"),
        (["--profile", "9"], 2, "100:120"),
        (["--profile", "20:25"], 2, "0 to 24"),
    ],
)
def test_exit_codes(arguments, code, message, dataset: Path, tmp_path: Path, capsys) -> None:
    found = main(
        ["train", "--dataset", str(dataset), "--set", f"root={tmp_path}", *SMALL, *arguments]
    )
    assert found == code
    assert message in capsys.readouterr().err


def test_warnings_follow_the_log_format(dataset: Path, tmp_path: Path, capsys) -> None:
    manifest = read_manifest(resolve_version(dataset))
    version = Path(shutil.copytree(resolve_version(dataset), tmp_path / "blind"))
    blind = replace(manifest, keys=replace(manifest.keys, seen=None))
    (version / "manifest.json").write_text(blind.dumps())
    arguments = ["--dataset", str(version), "--set", f"root={tmp_path}", *SMALL]
    code = main(["train", *arguments, "--log-format", "json"])
    assert code == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    warnings = [line for line in lines if line.get("level") == "warning"]
    assert len(warnings) == 1
    assert "no seen items" in warnings[0]["message"]


def test_uniform_negatives_need_no_tags(dataset: Path, tmp_path: Path) -> None:
    overrides = [
        f"root={tmp_path}",
        "name=t",
        "model.embedding_dim=4",
        "model.objective.negatives={source: mixed, count: 8}",
        "input.batch_size=64",
        "fit.epochs=1",
    ]
    sets = [part for override in overrides for part in ("--set", override)]
    assert main(["train", "--dataset", str(dataset), *sets]) == 0


def test_the_function_for_other_jobs(dataset: Path, tmp_path: Path) -> None:
    config = load_config(
        TrainConfig,
        "training",
        None,
        [
            f"dataset={dataset}",
            f"root={tmp_path}",
            "name=t",
            "model.name=mf",
            "input.batch_size=64",
            "fit.epochs=1",
        ],
    )
    run = train(config, log_format="json")
    assert (run / "history.json").exists()


LONG = ["--set", "fit.epochs=20", "--set", "fit.early_stopping=null"]


def start(dataset: Path, root: Path, *more: str) -> tuple[list[str], subprocess.Popen[str]]:
    """Starts a process that trains for a while; returns its command too."""
    arguments = ["--dataset", str(dataset), "--set", f"root={root}", *SMALL, *LONG, *more]
    command = [sys.executable, "-m", "jobs.train", *arguments]
    return command, subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def wait_for(process: subprocess.Popen[str], root: Path, pattern: str) -> Path:
    """Waits until a run has such a file, and returns the run's directory."""
    deadline = time.monotonic() + 600
    while not list(root.glob(f"t/runs/*/{pattern}")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (run,) = (root / "t" / "runs").iterdir()
    return run


@pytest.mark.exhaustive
def test_sigterm_saves_and_ends_with_its_own_exit_code(dataset: Path, tmp_path: Path) -> None:
    # More epochs than it can come to before the signal.
    _, process = start(dataset, tmp_path, "--set", "fit.epochs=100000")
    run = wait_for(process, tmp_path, "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "its state is saved" in told
    assert "--resume" in told
    assert "Traceback" not in told
    assert read_json(run / "run_card.json")["status"] == "interrupted"
    assert list((run / "checkpoints" / "last").iterdir())
    assert not (tmp_path / "t" / "CURRENT").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_run_resumes_where_its_last_checkpoint_was(dataset: Path, tmp_path: Path) -> None:
    command, process = start(dataset, tmp_path, "--set", "fit.checkpoint.every_steps=5")
    run = wait_for(process, tmp_path, "checkpoints/last/0000[2-9]-*")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    series = tmp_path / "t"
    assert not (series / "CURRENT").exists()
    assert read_json(run / "run_card.json")["status"] == "training"
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
    assert "resuming " in done.stderr
    assert (series / "CURRENT").read_text().strip() == run.name
    history = json.loads((run / "history.json").read_text())
    assert [entry["epoch"] for entry in history] == list(range(1, 21))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20 * 12


def test_runs_are_not_written_to_stores_without_conditions(dataset: Path, capsys) -> None:
    assert main(["train", "--dataset", str(dataset), *SMALL, "--set", "root=ftp://node/runs"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "root" in text
    assert "in a store with conditional puts" in text


def test_parameter_servers_are_refused_with_what_to_write(dataset: Path, capsys) -> None:
    arguments = ["train", "--dataset", str(dataset), *SMALL]
    assert main([*arguments, "--set", "devices.strategy=parameter_server"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "received: devices.strategy=parameter_server" in told
    assert "allowed: auto, none, mirrored, multi_worker" in told
    assert "set devices.strategy=multi_worker" in told
    assert "{kind: dynamic, shard: workers}" in told
    guide, title = re.search(r"(docs/\S+\.md), '([^']+)'", told).groups()
    assert f"## {title}" in (Path(__file__).parents[2] / guide).read_text()
    assert "Traceback" not in told
