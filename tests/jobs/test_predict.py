from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from conf.errors import ExitCode
from conf.run import read_json, resolve_run
from jobs.cli import run_app
from jobs.predict import app
from tests.jobs.runs import write_tiny_run


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("predict"), {"name": "dssm"})


def test_every_user_gets_a_list(series: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["--run", str(series), "--k", "4"]) == ExitCode.OK
    assert "first lists" in capsys.readouterr().out
    run = resolve_run(str(series))
    with gzip.open(run / "recommendations.json.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len({row["user"] for row in rows}) == len(rows) == 60
    assert {len(row["items"]) for row in rows} == {4}
    card = read_json(run / "run_card.json")
    assert card["recommendations"] == {
        "users": 60,
        "users_outside_vocabulary": 0,
        "k": 4,
        "mask_seen": True,
        "checkpoint": "best",
    }


def test_the_run_s_own_length_is_the_default(
    series: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["--run", str(series), "--log-format", "json"]) == ExitCode.OK
    file = Path(json.loads(capsys.readouterr().out)["recommendations"])
    with gzip.open(file, "rt") as lines:
        assert len(json.loads(next(lines))["items"]) == 20
    assert run_app(app, ["--run", str(series), "--set", "predict.k=0"]) == ExitCode.CONFIG
