from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.reporting.sweep import build_trials_table
from training.trials import Study, Trial

SETTINGS = ["name=s", "model.name=mf", "model.embedding_dim=4", "input.batch_size=128"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.training.tiny_dataset import write_tiny_dataset

    return write_tiny_dataset(tmp_path_factory.mktemp("datasets")).parent.parent


@pytest.fixture
def arguments(dataset: Path, tmp_path: Path) -> list[str]:
    file = tmp_path / "space.yaml"
    file.write_text("trials: 2\nspace:\n  optimizer.learning_rate: {low: 1e-3, high: 1e-1}\n")
    settings = [*SETTINGS, f"root={tmp_path / 'runs'}", "fit.epochs=1"]
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["train", "--dataset", str(dataset), *sets, "--sweep", str(file)]


@pytest.mark.exhaustive
def test_the_best_config_trains_again(arguments: list[str], tmp_path: Path, capsys) -> None:
    pytest.importorskip("optuna", reason="needs optuna: pip install 'sluice-recsys[sweep]'")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "complete" in out
    assert main([*arguments, "--resume", "--log-format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["best"]).is_relative_to(result["sweep"])
    page = Path(result["report"])
    links = re.findall(r'href="(trials/[^"]+)"', page.read_text())
    assert len(links) == 2
    assert all("Loss" in (page.parent / link).read_text() for link in links)
    assert main(["train", result["best_config"], "--no-report"]) == 0
    assert (tmp_path / "runs" / "s" / "CURRENT").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_sweep_goes_on_in_the_run_of_its_trial(
    arguments: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("optuna", reason="needs optuna: pip install 'sluice-recsys[sweep]'")
    long = ["--set", "fit.epochs=20", "--set", "fit.early_stopping=null"]
    command = [sys.executable, "-m", "jobs.cli", *arguments, *long]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    sweeps = tmp_path / "runs" / "s" / "sweeps"
    while not list(sweeps.glob("*/trials/0000/runs/*/checkpoints/last/0000[2-9]-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
    assert "resuming " in done.stderr
    (sweep,) = sweeps.iterdir()
    assert [len(list(trial.glob("runs/*"))) for trial in (sweep / "trials").iterdir()] == [1, 1]
    trials = json.loads((sweep / "trials.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]


def test_a_dry_run_tells_the_trials_and_touches_nothing(
    arguments: list[str], tmp_path: Path, capsys
) -> None:
    assert main([*arguments, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trials"] == 2
    assert plan["metric"] == "ndcg@10"
    assert not (tmp_path / "runs").exists()


def test_without_optuna_it_says_what_to_install(
    arguments: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(arguments) == 2
    assert "pip install 'sluice-recsys[sweep]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_refused(arguments: list[str], tmp_path: Path, capsys) -> None:
    for more, message in ((["--profile", "1:2"], "--sweep"), (["--sweep", "no.yaml"], "no such")):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_table_shows_values_as_they_are() -> None:
    from rich.console import Console

    trials = (
        Trial(0, "complete", {"a": "[red]"}, "run", 3.0, 0.25, 1),
        Trial(1, "fail", {"a": 0.000123456}, "diverged", 0.0),
    )
    console = Console(record=True, width=100)
    console.print(build_trials_table(Study(Path("x"), "mrr", list(trials))))
    text = console.export_text()
    for part in ("[red]", "0.0001235", "0.2500", "mrr", "fail"):
        assert part in text
