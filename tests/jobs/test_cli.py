"""The command line: users' mistakes end in a message and the right exit code."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import typer

from conf import errors
from conf.local_paths import local_path
from jobs.cli import SUBCOMMANDS, main
from jobs.support.run_app import run_app
from jobs.support.terminal import setup_logging


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_subcommand(capsys, arguments):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUBCOMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sluice ")


@pytest.mark.exhaustive
def test_the_cache_of_compiled_code_can_be_switched_off(tmp_path):
    """Reads no cache and writes none, and the command works all the same."""
    source = tmp_path / "a.csv"
    source.write_text("id\n1\n")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "jobs.cli", "--no-jit-cache", "convert", str(source),
               str(tmp_path / "a.tfrecord")]  # fmt: skip
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert (tmp_path / "a.tfrecord").stat().st_size > 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["convert STORE/a.csv b.tfrecord", "convert a.csv STORE/b",
                                     "data generate --out STORE/logs"])  # fmt: skip
@pytest.mark.parametrize("store", ["hdfs://node:8020", "s3://bucket"])
def test_a_store_is_refused_where_only_a_file_can_be(command, store, tmp_path, monkeypatch, capsys):
    """A path would lose a slash of it, and be a folder named after the scheme."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("id\n1\n")
    assert main(command.replace("STORE", store).split()) == 2
    assert "must be on a file system" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_files_are_named_by_paths_or_by_uris_of_files(name):
    app = importlib.import_module(SUBCOMMANDS[name][0]).app
    for command in app.registered_commands:
        hints = typing.get_type_hints(command.callback, include_extras=True)
        for hint in hints.values():
            kind, *about = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
            if kind is Path or Path in typing.get_args(kind):
                assert [info.parser for info in about] == [local_path], (command.callback, hint)


def test_unknown_subcommand_names_the_nearest(capsys):
    assert main(["biuld"]) == 2
    assert "did you mean 'build'?" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_explains_itself(capsys, name, asked):
    assert main([name, asked]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.ConfigError("c"), 2),
        (errors.InputDataError("i"), 3),
        (errors.UpstreamNotReadyError("u"), 4),
        (errors.TrainingDivergedError("t"), 5),
        (errors.InternalError("x"), 1),
        (OSError(28, "No space left on device", "/out"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_errors_end_in_their_exit_code_without_a_trace(capsys, raised, code):
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise raised

    assert run_app(app, []) == code
    err = capsys.readouterr().err
    assert err
    assert "Traceback" not in err


def test_sigterm_lets_a_command_clear_up_as_ctrl_c_does(capsys):
    app, told = typer.Typer(), []

    @app.command()
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            told.append("cleared up")

    assert run_app(app, []) == 1
    assert "interrupted; what was published before is untouched" in capsys.readouterr().err
    assert told == ["cleared up"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("given", [["--log-format", "json"], ["--log-format=json"]])
@pytest.mark.parametrize(
    ("raised", "code", "parts"),
    [
        (
            errors.InputDataError("bad", received=Path("a/b"), allowed="good", fix="mend it"),
            3,
            {"message": "bad", "received": "a/b", "allowed": "good", "fix": "mend it"},
        ),
        (errors.TrainingDivergedError("t"), 5, {"message": "t"}),
        (OSError(13, "Permission denied", "/out"), 1, {"message": "Permission denied: /out"}),
        (
            KeyboardInterrupt(),
            1,
            {"message": "interrupted; what was published before is untouched"},
        ),
    ],
)
def test_an_error_is_one_object_where_lines_are_json(capsys, given, raised, code, parts):
    app = typer.Typer()

    @app.command()
    def fail(log_format: str = "text") -> None:
        raise raised

    assert run_app(app, given) == code
    [line] = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert abs(told.pop("time") - time.time()) < 60
    assert told == {"event": "error", "exit_code": code, **parts}


def test_a_usage_error_is_one_object_too(capsys):
    assert main(["train", "--log-format", "json", "--nope"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--nope" in json.loads(line)["message"]


def test_usage_errors_are_exit_code_2(capsys):
    assert main(["build", "--nope"]) == 2
    assert "nope" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "ml_1"],
        ["build", "ml_1m", "--set", "outptu.shards=1"],
        ["train", "demo", "--set", "model.temprature=1"],
    ],
)
def test_config_mistakes_start_nothing(capsys, arguments):
    assert main(arguments) == 2
    assert "did you mean" in capsys.readouterr().err


def test_what_to_install_fits_the_place(monkeypatch, tmp_path):
    own = Path(sys.executable).parent / "pip"
    monkeypatch.setattr(errors.shutil, "which", lambda name: str(own))
    monkeypatch.setattr(errors, "read_code_version", lambda: "0.1.0")
    assert errors.install_hint("serve") == "pip install 'sluice-recsys[serve]'"
    # Sources that are not installed name their folder: no index need have them.
    monkeypatch.setattr(errors, "read_code_version", lambda: errors.UNKNOWN_VERSION)
    sources = Path(errors.__file__).parents[1]
    assert errors.install_hint("serve") == f"pip install '{sources}[serve]'"
    # A zip of the code on an executor has no such folder.
    monkeypatch.setattr(errors, "_SOURCES", tmp_path)
    assert errors.install_hint("serve") == "pip install 'sluice-recsys[serve]'"
    # Another Python's `pip` would install for that one.
    monkeypatch.setattr(errors.shutil, "which", lambda name: "/elsewhere/bin/pip")
    hint = errors.install_hint("serve")
    assert hint == f"{sys.executable} -m pip install 'sluice-recsys[serve]'"


def test_missing_inputs_have_their_codes(capsys, tmp_path):
    assert main(["build", "ml_1m", "--data", str(tmp_path / "lgos")]) == 2
    assert "correct --data" in capsys.readouterr().err
    assert main(["build", "ml_1m", "--data", str(tmp_path)]) == 3
    assert "no such file" in capsys.readouterr().err
    assert main(["train", "demo", "--dataset", str(tmp_path)]) == 4
    assert "no published dataset" in capsys.readouterr().err
    assert main(["evaluate", "--run", str(tmp_path)]) == 4


def test_dry_run_touches_nothing(capsys, tmp_path):
    for name in ("ratings", "users", "movies"):
        (tmp_path / f"{name}.dat").write_text("x\n")
    out = tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--set", f"output.root={out}", "--dry-run"]
    assert main(["build", "ml_1m", *arguments]) == 0
    assert "movie_id" in capsys.readouterr().out
    assert not out.exists()


def test_exit_code_of_the_process():
    command = [sys.executable, "-m", "jobs.cli", "nosuch"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


@pytest.fixture
def sluice_log():
    return logging.getLogger("sluice.some.part")


def test_warnings_stand_out_from_progress(sluice_log, capsys):
    setup_logging("text")
    sluice_log.info("read sources: %s", "1.0 s")
    sluice_log.warning("late rows: %d", 3)
    progress, warning = capsys.readouterr().err.splitlines()
    assert progress.partition(" ")[2] == "read sources: 1.0 s"
    assert warning.partition(" ")[2] == "warning: late rows: 3"


def test_schedulers_read_the_level(sluice_log, capsys):
    setup_logging("json")
    sluice_log.warning("late rows: %d", 3)
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["message"]) == ("warning", "late rows: 3")


CODE = """
import os, sys
from jobs.support.terminal import quiet_tensorflow
try:
    with quiet_tensorflow():
        os.write(2, b"noise\\n")
        if len(sys.argv) > 1:
            raise RuntimeError
except RuntimeError:
    pass
os.write(2, b"after\\n")
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, "after\n"),
        (["fail"], {}, "noise\nafter\n"),
        ([], {"TF_CPP_MIN_LOG_LEVEL": "0"}, "noise\nafter\n"),
    ],
)
def test_notes_are_hidden_unless_they_are_needed(
    arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    assert done.stderr == expected


def run_beside(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["conf", "etl", "jobs", "training"])
def test_a_package_that_hides_ours_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    script = str(Path(sys.executable).with_name("sluice"))
    done = run_beside(tmp_path, script, "build", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: a package {name!r} that is not Sluice's")
    assert str(tmp_path / name) in done.stderr
    assert len(done.stderr.splitlines()) == 4


def test_a_module_of_jobs_names_a_hidden_package_too(tmp_path: Path) -> None:
    (tmp_path / "conf.py").touch()
    done = run_beside(tmp_path, "-m", "jobs.build_dataset", "demo")
    assert done.returncode == 1
    assert "a package 'conf' that is not Sluice's" in done.stderr


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "etl").mkdir()
    done = run_beside(tmp_path, "-m", "sluice_recsys", "--version")
    assert (done.returncode, done.stderr) == (0, "")


FORMATS = """
import pyspark_sluice, pyspark_tfrecord, pyspark_tfrecords
from pyspark.serializers import CloudPickleSerializer

pickler = CloudPickleSerializer()
for module in (pyspark_sluice, pyspark_tfrecord, pyspark_tfrecords):
    source = module.DefaultSource
    copy = pickler.loads(pickler.dumps(source))
    try:
        copy(options={})
    except ImportError as error:
        print(copy.name(), str(error).splitlines()[0])
"""


def test_the_formats_name_a_package_that_hides_ours(tmp_path: Path) -> None:
    (tmp_path / "etl.py").touch()
    done = run_beside(tmp_path, "-c", FORMATS)
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["sluice", "a", "package", "'etl'"],
        ["tfrecord", "a", "package", "'etl'"],
        ["tfrecords", "a", "package", "'etl'"],
    ], done.stderr
