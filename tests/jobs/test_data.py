import hashlib
import json
import socket
import subprocess
import sys

import pytest

from etl.sample_data import archive
from etl.sample_data.archive import ARCHIVES
from jobs.data import app
from jobs.support.run_app import run_app
from tests.etl.sample_data.helpers import FILES, Script, make_zip, serve


def test_generate_writes_the_sample_it_was_asked_for(tmp_path, capsys):
    out = tmp_path / "sample"
    arguments = [
        "generate",
        "--out",
        str(out),
        "--ratings",
        "4_000",
        "--users",
        "90",
        "--movies",
        "200",
        "--seed",
        "5",
        "--dirty-rate",
        "0.01",
        "--duplicate-rate",
        "0",
        "--unknown-rate",
        "0",
    ]
    assert run_app(app, arguments) == 0
    card = json.loads((out / "SAMPLE.json").read_text())
    assert (card["config"]["users"], card["config"]["movies"]) == (90, 200)
    assert card["config"]["seed"] == 5
    assert len((out / "users.dat").read_bytes().splitlines()) == 90
    assert len((out / "ratings.dat").read_bytes().splitlines()) == 4_040
    assert "90 users, 200 movies, 4,000 ratings and 40 lines of dirt" in capsys.readouterr().out


def test_clicks_writes_the_sessions_it_was_asked_for(tmp_path, capsys):
    out = tmp_path / "clicks"
    arguments = ["clicks", "--out", str(out), "--sessions", "200", "--videos", "50"]
    assert run_app(app, [*arguments, "--dirty-rate", "0.05", "--seed", "3"]) == 0
    card = json.loads((out / "SAMPLE.json").read_text())
    assert card["config"] == {"sessions": 200, "videos": 50, "seed": 3, "dirty": 0.05}
    assert len((out / "clicks.tsv").read_text().splitlines()) == 210
    assert "200 sessions of 50 videos and 10 malformed ones" in capsys.readouterr().out
    assert run_app(app, arguments) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_generate_keeps_an_earlier_sample_unless_told(tmp_path, capsys):
    out = tmp_path / "sample"
    arguments = ["generate", "--out", str(out), "--ratings", "1000"]
    assert run_app(app, arguments) == 0
    before = (out / "ratings.dat").read_bytes()
    assert run_app(app, [*arguments, "--seed", "8"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "ratings.dat").read_bytes() == before
    assert run_app(app, [*arguments, "--seed", "8", "--overwrite"]) == 0
    assert (out / "ratings.dat").read_bytes() != before


@pytest.mark.parametrize(
    "wrong",
    [
        ["--ratings", "many"],
        ["--ratings", "5"],
        ["--dirty-rate", "2"],
        ["--seed", "-1"],
        ["--users", "1"],
        ["--ratings", "1000", "--users", "999"],
    ],
)
def test_generate_refuses_wrong_options_with_exit_code_2(tmp_path, wrong):
    assert run_app(app, ["generate", "--out", str(tmp_path / "sample"), *wrong]) == 2
    assert list(tmp_path.iterdir()) == []


def test_generate_runs_as_a_module(tmp_path):
    arguments = ["generate", "--ratings", "300_000", "--users", "4_000", "--movies", "500"]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.data", *arguments, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress where there is no terminal
    assert json.loads((tmp_path / "out" / "SAMPLE.json").read_text())["chunks"] == 2


def test_fetch_unpacks_a_verified_archive(tmp_path, monkeypatch):
    script = Script(make_zip())
    monkeypatch.setitem(ARCHIVES, "ml-x", hashlib.sha256(script.body).hexdigest())
    with serve(script):
        code = run_app(
            app, ["fetch", "ml-x", "--out", str(tmp_path / "out"), "--base-url", script.base_url]
        )
    assert code == 0
    assert (tmp_path / "out" / "users.dat").read_bytes() == FILES["ml-x/users.dat"]


def test_fetch_refuses_a_file_that_is_not_the_published_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(archive, "_RETRIES", 0)
    with serve(Script(make_zip())) as script:
        code = run_app(
            app, ["fetch", "ml-1m", "--out", str(tmp_path / "out"), "--base-url", script.base_url]
        )
    assert code == 3
    assert "a6898adb50b9ca05aa231689da44c217" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def test_fetch_without_a_network_ends_in_exit_code_4(tmp_path, capsys, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(archive, "_RETRIES", 0)
        arguments = ["fetch", "ml-100k", "--out", str(tmp_path / "out"), "--base-url", url]
        code = run_app(app, arguments)
    assert code == 4
    assert "cannot download" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def test_fetch_names_the_nearest_data_set(capsys):
    assert run_app(app, ["fetch", "ml-1mm"]) == 2
    assert "ml-1m" in capsys.readouterr().err
