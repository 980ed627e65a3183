"""Batch scoring on Spark, by a Python of the executors that has no Sluice."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jobs.score
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from jobs.score import app
from jobs.support.spark_scoring import SparkInput, check_parts, open_input
from pyspark.sql import functions as F
from training.scoring.executor import RowSource
from training.scoring.plan import Exported, ScoringRequest, build_job, plan_task, set_rows

from conf.artefacts.export import ExportOptions, Give
from conf.errors import ConfigError, InputDataError
from etl.sources.text_files import escape_path
from jobs.export import export
from jobs.predict import RowsToPredict, predict
from jobs.support.java_runtime import ensure_java
from jobs.support.run_app import run_app
from tests.jobs.runs import write_tiny_run
from tests.training.number_features import NAN, ROW, build_number_model
from tests.training.tiny_dataset import TinyConfig
from training.export.saved_model import write_export
from training.raw_inputs.files import RawFile, RawReader
from training.raw_inputs.inputs import InputColumn

ROOT = Path(__file__).parents[2]
TOWERS = {"name": "dssm", "user_hidden_units": [16], "embedding_dim": 8}
SCORES = {
    "kind": "ranking", "network": "deepfm", "embedding_dim": 4, "embedding_stddev": 1.0,
    "features": ["user_id", "gender", "movie_id", "genres"],
}  # fmt: skip
USERS = TinyConfig(users=2500, items=90)
# Takes Sluice off the path of the Python that runs it, or ends it.
WITHOUT_SLUICE = f"""
import importlib.util, os, sys
sys.path[:] = [path for path in sys.path if os.path.realpath(path or ".") != {str(ROOT)!r}]
if any(map(importlib.util.find_spec, ("conf", "etl", "training", "jobs"))):
    os._exit(77)
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(WITHOUT_SLUICE)
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={folder}:$PYTHONPATH\ncd {folder}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def session(spark, bare_python, monkeypatch):
    """The suite's session, whose executors have no Sluice; a job leaves it as it is."""
    own = spark.newSession()
    own.stop = lambda: None
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare_python))
    monkeypatch.setattr(jobs.score, "build_session", lambda *_: own)
    return own


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, model in (("towers", TOWERS), ("scores", SCORES)):
        root = tmp_path_factory.mktemp(name)
        found[name] = write_tiny_run(root, model, USERS)
        export(found[name], options=ExportOptions(root / "models"))
    return found


def model_of(runs: dict[str, Path], name: str) -> str:
    return str(runs[name].parents[1] / "models")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Raw rows, more than a batch, with unknown values and missing ones."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with file.open("w") as out:
        for number in range(2600):
            row = {
                "user_id": 1000 + number % 2700, "gender": [None, "F", "M", "?"][number % 4],
                "history": [100 + (number * step) % 95 for step in range(number % 5)],
                "movie_id": 100 + number % 95, "genres": [f"genre_{number % 7}"] * (number % 3),
                "key": f"r{number}",
            }  # fmt: skip
            out.write(json.dumps({name: value for name, value in row.items() if value is not None}))
            out.write("\n")
    return file


def join(output: Path) -> bytes:
    parts = sorted(output.glob("part-*"))
    return b"".join(gzip.decompress(part.read_bytes()) for part in parts)


def score(*arguments: object) -> int:
    return run_app(app, [str(argument) for argument in arguments])


CARD = {
    "name": "m", "version": "1", "fingerprint": "f",
    "outputs": [{"name": "click", "kind": "binary"}],
    "lists": {"defaults": {"k": 5, "mask_seen": True, "task": None}, "batch_size": 10},
    "users": {"rows": 3, "features": ["user"], "has_seen": False},
    "signatures": {
        "serving_default": {"inputs": [{"name": "hour", "feature": "hour"}]},
        "rank_items": {"inputs": [{"name": "hour", "feature": "hour"}, {"name": "items"}]},
        "rank_items_encoded": {"inputs": [{"name": "hour", "feature": "hour"}, {"name": "items"}]},
    },
}  # fmt: skip
ROWS = RowSource("rows.csv")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"source": ROWS, "give": Give.SCORES, "k": 3}, "about lists"),
        ({"source": ROWS, "k": 3, "task": "clack"}, "no such task"),
        ({"source": ROWS, "k": 3, "keep_seen": True}, "nobody knows what was met"),
        ({"source": ROWS, "give": Give.USER_EMBEDDING, "suffix": "jsonl"}, "written as parquet"),
        ({"give": Give.SCORES}, "there are no rows"),
        ({"source": ROWS, "give": Give.USER_EMBEDDING}, "cannot give that"),
        ({}, "cannot be left out"),
        ({"keep_seen": True}, "more than the export knows"),
        ({"source": RowSource("r", id_column="click")}, "name of an output"),
    ],
)
def test_what_does_not_fit_is_refused_before_spark_starts(tmp_path, request_, said) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_task(Exported(tmp_path, CARD), ScoringRequest(tmp_path / "out", **request_))


def test_a_job_knows_its_own_output(tmp_path) -> None:
    exported, output = Exported(tmp_path, CARD), tmp_path / "out"
    task = plan_task(exported, ScoringRequest(output, source=ROWS, part_rows=11))
    assert (task.part_rows, task.outputs, task.suffix) == (20, ("click",), "parquet")
    job = build_job(exported, set_rows(task, 45), {"files": [["a", 1, 2]]})
    assert job.open() == "new"
    assert (job.open(), job.find_missing()) == ("running", [0, 1, 2])
    for part in range(3):
        (output / task.name_part(part)).write_bytes(b"x")
    (output / f".{task.name_part(1)}.dead.tmp").write_bytes(b"")
    job.finish()
    assert (job.open(), job.find_missing()) == ("finished", [])
    (output / "_score.json").rename(output / "score.json")  # As before: it is found, and renamed.
    assert job.open() == "finished"
    record = json.loads((output / "_score.json").read_text())
    assert [file["rows"] for file in record["files"].values()] == [20, 20, 5]
    assert len(list(output.iterdir())) == 4  # What a killed task left is gone.
    for other in (
        build_job(exported, set_rows(task, 46), {"files": [["a", 1, 2]]}),
        build_job(exported, set_rows(task, 45), {"files": [["a", 9, 2]]}),
        build_job(Exported(tmp_path, {**CARD, "fingerprint": "g"}), set_rows(task, 45),
                  {"files": [["a", 1, 2]]}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="another job"):
            other.open()
    with pytest.raises(ConfigError, match="other files"):
        build_job(exported, replace(task, output=str(tmp_path), rows=1), {}).open()
    with pytest.raises(InputDataError, match="no rows"):
        set_rows(task, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--id", "x"], 2, "are about rows"),
        (["--input", "a.csv", "--option", "sep"], 2, "has a value"),
        (["--input", "a.csv", "b.parquet"], 2, ""),
        (["--set", "sprak.master=x"], 2, "spark.master"),
        (["--model", "/nowhere"], 4, "no exported model"),
    ],
)
def test_wrong_use_has_a_message_and_a_code(tmp_path, capsys, arguments, code, said) -> None:
    assert score("--model", tmp_path, "--to", tmp_path / "out", *arguments) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quotes_around_nothing_are_the_empty_text_as_predict_reads_it(spark, tmp_path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"",x\n,"y"\n')
    found = open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    assert [tuple(row) for row in found.frame.collect()] == [("", "x"), (None, "y")]
    column = InputColumn("a", "a", "a", "string", False, None, None, None, b"none")
    [own] = RawReader(RawFile(tmp_path / "a.csv"), [column]).read(9)
    assert own.inputs["a"].tolist() == [b"", b"none"]


@pytest.mark.parametrize("line", ['2,"abc', '2,"', '2,"a"b'])
def test_a_quote_without_an_end_is_refused(spark, tmp_path, line) -> None:
    (tmp_path / "a.csv").write_text(f'a,b\n1,5" pipe\n1,"a ""b"""\n{line}\n')
    with pytest.raises(InputDataError, match="a quote that does not end") as refused:
        open_input(spark.newSession(), SparkInput((str(tmp_path / "a.csv"),)))
    assert repr(line) in refused.value.received


def test_tabs_separate_without_quotes_as_predict_reads_them(spark, tmp_path) -> None:
    rows = tmp_path / "a.tsv"
    rows.write_text('a\tb\n5" pipe\tx\nsay "x\ty"\n')
    found = open_input(spark.newSession(), SparkInput((str(rows),)))
    column = InputColumn("a", "a", "a", "string", False, None, None, None)
    [own] = RawReader(RawFile(rows), [column]).read(9)
    assert [row["a"].encode() for row in found.frame.collect()] == own.inputs["a"].tolist()
    rows.write_text('a\tb\n1\t"x"\n')
    with pytest.raises(InputDataError, match="a quote before a field"):
        open_input(spark.newSession(), SparkInput((str(rows),)))
    with pytest.raises(InputDataError, match="cannot be read") as refused:
        list(RawReader(RawFile(rows), [column]).read(9))
    assert "line 2" in refused.value.received


def test_columns_of_parquet_that_spark_does_not_read_are_left_out(spark, tmp_path) -> None:
    columns = {
        "id": [1],
        "ns": pa.array([1], pa.timestamp("ns")),
        "u": pa.array([b"0" * 16], pa.uuid()),
    }
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table(columns), tmp_path / f"day={day}" / "a.parquet")
    found = open_input(spark.newSession(), SparkInput((str(tmp_path),), "parquet"))
    assert found.columns == ("id", "day")
    assert sorted(map(tuple, found.frame.collect())) == [(1, 1), (1, 2)]
    check_parts(found, ["id", "day"])


def test_files_with_other_headers_are_refused(spark, tmp_path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b,a\n3,4\n")
    with pytest.raises(InputDataError, match="different headers") as refused:
        open_input(spark.newSession(), SparkInput((str(tmp_path),), "csv"))
    assert refused.value.received.endswith(".csv")


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_a_part_that_lacks_a_column_is_named(spark, tmp_path, kind) -> None:
    folder = tmp_path / "a b[1]"
    for day in (1, 2):
        rows = spark.range(3).withColumn("x", F.lit(1.0)).coalesce(1)
        rows.write.format(kind).save(str(folder / f"day={day}"))
    source = SparkInput((f"{escape_path(str(folder))}",), kind)
    check_parts(open_input(spark.newSession(), source), ["id", "x", "day"])
    spark.range(3).coalesce(1).write.format(kind).save(str(folder / "day=3"))
    schema = {"mergeSchema": "true"}
    found = open_input(spark.newSession(), replace(source, options=schema))
    check_parts(found, ["id", "day"])
    with pytest.raises(InputDataError, match="lacks columns") as refused:
        check_parts(found, ["id", "x", "day"])
    assert "/a b[1]/day=3/part-" in refused.value.received
    assert refused.value.received.endswith(": no x")


EXHAUSTIVE = pytest.mark.exhaustive


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["towers", "scores"])
def test_lists_of_all_users_are_those_of_predict(session, runs, tmp_path, name) -> None:
    _, lists = predict(runs[name], RowsToPredict(output=tmp_path / "lists.json.gz"))
    options = ["--model", model_of(runs, name), "--to", tmp_path / "out"]
    assert score(*options, "--part-rows", 1000, *["--give", "lists"]) == 0
    assert len(list((tmp_path / "out").glob("part-*"))) == 3
    assert join(tmp_path / "out") == gzip.decompress(lists.read_bytes())
    if name == "towers":  # One partition: the very file.
        assert score(*options[:2], "--to", tmp_path / "whole") == 0
        assert (tmp_path / "whole" / "part-00000.json.gz").read_bytes() == lists.read_bytes()


@EXHAUSTIVE
def test_rows_are_those_of_predict(session, runs, rows, tmp_path) -> None:
    for suffix in ("parquet", "jsonl.gz"):
        ask = RowsToPredict(file=RawFile(rows, "key"), output=tmp_path / f"own.{suffix}")
        _, own = predict(runs["scores"], ask)
        output = tmp_path / suffix
        options = ["--model", model_of(runs, "scores"), "--to", output, "--input", rows]
        assert score(*options, "--id", "key", "--part-rows", 1, "--as", suffix) == 0
        if suffix == "parquet":
            parts = [pq.read_table(part) for part in sorted(output.glob("part-*"))]
            assert pa.concat_tables(parts).equals(pq.read_table(own))
        else:
            assert join(output) == gzip.decompress(own.read_bytes())
    ask = RowsToPredict(file=RawFile(rows), output=tmp_path / "lists.json.gz")
    _, own = predict(runs["towers"], ask)
    options = ["--model", model_of(runs, "towers"), "--to", tmp_path / "lists", "--input", rows]
    assert score(*options, "--part-rows", 1024) == 0
    assert join(tmp_path / "lists") == gzip.decompress(own.read_bytes())
    options[3] = tmp_path / "columns"
    assert score(*options, "--part-rows", 1024, "--as", "parquet") == 0
    parts = [pq.read_table(part) for part in sorted((tmp_path / "columns").glob("part-*"))]
    lines = gzip.decompress(own.read_bytes()).splitlines()
    found = pa.concat_tables(parts).to_pylist()
    assert [row["items"] for row in found] == [json.loads(line)["items"] for line in lines]


@EXHAUSTIVE
def test_candidates_and_vectors_are_those_of_the_export(session, runs, rows, tmp_path) -> None:
    """Rows as CSV, in which a list is text."""
    names = ("user_id", "gender", "history", "movie_id", "genres", "key")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    flat = [{n: "|".join(map(str, v)) or None if isinstance(v := row.get(n), list) else v
             for n in names} for row in lines]  # fmt: skip
    pa_csv.write_csv(pa.Table.from_pylist(flat), tmp_path / "rows.csv")
    (tmp_path / "few.csv").write_text("movie_id\n105\n103\n170\n999\n")
    for name in ("towers", "scores"):
        file, few = RawFile(tmp_path / "rows.csv", "key"), RawFile(tmp_path / "few.csv")
        ask = RowsToPredict(file=file, candidates=few, output=tmp_path / f"{name}.json.gz")
        _, own = predict(runs[name], ask)
        options = ["--model", model_of(runs, name), "--to", tmp_path / name, "--k", 20]
        options += ["--input", tmp_path / "rows.csv", "--id", "key", "--part-rows", 2048]
        assert score(*options, "--candidates", tmp_path / "few.csv") == 0
        assert join(tmp_path / name) == gzip.decompress(own.read_bytes())
    options = ["--model", model_of(runs, "towers"), "--to", tmp_path / "vectors"]
    options += ["--input", rows, "--give", "item_embedding", "--id", "key"]
    assert score(*options) == 0
    found = pq.read_table(tmp_path / "vectors" / "part-00000.parquet").to_pydict()
    assert found["key"] == [row["key"] for row in lines]
    [version] = Path(model_of(runs, "towers")).glob("*/1")
    embed = tf.saved_model.load(str(version)).signatures["item_embedding"]
    for row, vector in zip(lines[:40], found["embedding"], strict=False):
        raw = {"movie_id": tf.constant([row["movie_id"]], tf.int64),
               "genres": tf.constant([[*row["genres"], "<sluice:pad>"]])}  # fmt: skip
        given = {name: raw[name] for name in embed.structured_input_signature[1]}
        np.testing.assert_allclose(embed(**given)["embedding"][0], vector, atol=1e-6)


@EXHAUSTIVE
def test_a_job_goes_on_with_what_is_missing(session, runs, rows, tmp_path, capsys) -> None:
    options = ["--model", model_of(runs, "scores"), "--to", tmp_path / "out"]
    options += ["--part-rows", 1, "--as", "jsonl", "--log-format", "json", "--input"]
    bad = tmp_path / "bad.jsonl"
    lines = rows.read_text().splitlines()
    lines[1500] = json.dumps({**json.loads(lines[1500]), "movie_id": "x"})
    bad.write_text("\n".join(lines) + "\n")
    assert score(*options, bad) == 3
    said = capsys.readouterr().err
    assert "row 1501: column 'movie_id'" in said
    assert score(*options, rows) == 2
    assert "another job" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    assert score(*options, rows) == 0
    before = {part.name: part.read_bytes() for part in (tmp_path / "out").glob("part-*")}
    assert len(before) == 3
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before}
    (tmp_path / "out" / "part-00001.jsonl").unlink()
    assert score(*options, rows) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["computed"] == 1
    assert {part.name: part.read_bytes() for part in (tmp_path / "out").glob("part-*")} == before
    now = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before}
    assert [name for name in now if now[name] != times[name]] == ["part-00001.jsonl"]
    assert score(*options, rows) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["computed"] == 0
    export(runs["scores"], options=ExportOptions(runs["scores"].parents[1] / "models"))
    assert score(*options, rows) == 2
    assert "model differ" in capsys.readouterr().err


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        ("a.csv", "user_id,gender,movie_id\n1,F,2\n", 3, "missing: genres"),
        ("a.csv", "user_id,gender,movie_id,genres\n", 3, "no rows"),
        ("a.csv", "user_id,gender,movie_id,genres\n1,F,2,a\n1,F\n", 3, "damaged"),
        ("a.csv", "user_id,gender,movie_id,genres\n1,F,2.5,a\n", 3, "row 1: column 'movie_id'"),
        ("a.jsonl", "{}\n[]\n", 3, "row 2: the line is no JSON object"),
        ("a.parquet", "no parquet", 3, ""),
        ("a.txt", "x", 2, "format of the input"),
        (None, "", 3, "no such input"),
    ],
)
def test_bad_inputs_are_refused(session, runs, tmp_path, capsys, name, text, code, said) -> None:
    path = tmp_path / (name or "none.csv")
    if name is not None:
        path.write_text(text)
    options = ["--model", model_of(runs, "scores"), "--to", tmp_path / "out", "--input", path]
    assert score(*options) == code
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("part-*"))


@EXHAUSTIVE
def test_numbers_that_are_not_finite_end_a_job(session, tmp_path, capsys) -> None:
    write_export(build_number_model(tmp_path), ExportOptions(tmp_path / "models"))
    options = ["--model", tmp_path / "models", "--as", "jsonl", "--input", tmp_path / "rows.jsonl"]
    for number, bad in enumerate(({}, {"cost": 1e39}, {"tastes": [1.0, NAN]})):
        lines = [json.dumps({**ROW, **(bad if row == 33 else {})}) for row in range(50)]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        output = tmp_path / f"out{number}"
        assert score(*options, "--to", output) == (3 if bad else 0)
        said = capsys.readouterr().err
        for name in bad:
            assert f"row 34: column '{name}'" in said
            assert "finite numbers" in said
        assert bool(list(output.glob("part-*"))) == (not bad)


@EXHAUSTIVE
@pytest.mark.slow
def test_a_killed_submission_is_finished_by_another(
    session, bare_python, runs, rows, tmp_path
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(rows.read_text() * 40)
    options = ["--model", model_of(runs, "scores"), "--input", str(many), "--part-rows", "1",
               "--as", "jsonl"]  # fmt: skip
    ensure_java()
    environment = {**os.environ, "PYSPARK_PYTHON": str(bare_python),
                   "PYSPARK_DRIVER_PYTHON": sys.executable}  # fmt: skip
    command = [Path(sys.executable).with_name("spark-submit"), "--master", "local[1]",
               "--conf", "spark.ui.enabled=false", ROOT / "jobs" / "score.py"]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen([*command, *options, "--to", tmp_path / "out"], env=environment,
                                  stdout=log, stderr=log, start_new_session=True)  # fmt: skip
        while not list((tmp_path / "out").glob("part-*")):
            assert killed.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    before = {part.name for part in (tmp_path / "out").glob("part-*")}
    assert 0 < len(before) < 102
    assert score(*options, "--to", tmp_path / "out") == 0
    assert score(*options, "--to", tmp_path / "whole") == 0
    parts = {part.name: part.read_bytes() for part in (tmp_path / "out").glob("part-*")}
    assert len(parts) == 102
    assert parts == {part.name: part.read_bytes() for part in (tmp_path / "whole").glob("part-*")}
    assert len(list((tmp_path / "out").iterdir())) == 103
